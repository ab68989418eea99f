"""A short training that is told to W&B."""

import itertools
from collections import defaultdict

import art_core as art
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent


def odd(trajectory):
    trajectory.notes["why"] = f"{trajectory.output} is what it is"
    trajectory.metrics["success"] = float(int(trajectory.output) % 2)
    return trajectory.metrics["success"]


def settings(folder):
    numbers = defaultdict(itertools.count)

    def number(request):
        """Count for each task alone: a group has an odd one and an even one, whichever rollout asks first."""
        return str(next(numbers[request["messages"][0]["content"]]))

    return {
        "model": "tiny", "steps": 2, "tasks_per_step": 2, "group_size": 2, "engine": FakeEngine(number),
        "learner": CountingLearner(), "run_dir": folder, "progress": False, "reward": odd, "trackers": ["wandb"],
    }  # fmt: skip


async def train(folder, **more):
    return await art.train(ScriptedAgent(), ["a", "b"], **{**settings(folder), **more})
