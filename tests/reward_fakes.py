"""Groups, a metered judge, and settings of short runs, for tests of rewards."""

import asyncio
import io
import json
import math

from rich.console import Console

import art_core as art
from art_core.loop.display import Display
from art_core.plugins import Plugins
from art_core.testing import CountingLearner, FakeEngine
from art_core.types import Call, Group, Trajectory


def group_of(*outputs) -> Group:
    call = Call(prompt_ids=(1,), sampled_ids=(2,), logprobs=(-0.5,))
    return Group("t", tuple(Trajectory("t", (call, call), output=it, rollout_id=f"r{it}") for it in outputs))


def right(trajectory):
    trajectory.metrics["success"] = float(trajectory.output == 1)
    return trajectory.metrics["success"]


def unlike(trajectory):
    """A number that no other rollout has, so that every group has contrast."""
    return float(int(trajectory.rollout_id[:8], 16))


class Judge:
    """Scores every rollout ``value``, for a price, until its budget is spent."""

    def __init__(self, value=0.5, budget=math.inf):
        self.value, self.budget, self.spent = value, budget, 0.0
        self.begun = []

    async def score(self, group):
        if self.exhausted():
            for trajectory in group.trajectories:
                trajectory.notes["unscored"] = "the budget is spent"
            return [None] * len(group.trajectories)
        self.spent += 1.0
        for trajectory in group.trajectories:
            trajectory.notes["judge"] = f"worth {self.value}"
        value = self.value if callable(self.value) else lambda index: self.value
        return [value(index) for index in range(len(group.trajectories))]

    def begin(self, run_dir):
        self.begun.append(run_dir)

    def account(self):
        return {"judge/cost": self.spent}

    def exhausted(self):
        return "the budget of the judge is spent, raise it" if self.spent >= self.budget else None


def offering(**rewards) -> Plugins:
    class Plugin:
        @art.hookimpl
        def register_rewards(self, register):
            for name, reward in rewards.items():
                register(name, lambda reward=reward: reward)

    return Plugins(Plugin(), installed=False)


def settings(tmp_path, **more):
    return {
        "model": "tiny", "steps": 2, "tasks_per_step": 1, "group_size": 2, "engine": FakeEngine(), "progress": False,
        "learner": CountingLearner(), "run_dir": tmp_path / "run", **more,
    }  # fmt: skip


def lines_of(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def told_display():
    told = io.StringIO()
    return told, Display(console=Console(file=told, width=500))


async def cancelled_at(event, coroutine, run_dir, *, finished=0, scored=0, split="eval"):
    """Cancel a call once the event is set, and its folder has so many finished and so many scored rollouts."""
    task = asyncio.create_task(coroutine)
    await event.wait()
    while True:
        kept = art.load_trajectories(run_dir, split=split)
        if len(kept) >= finished and sum(it.reward is not None for it in kept) >= scored:
            break
        assert not task.done(), "it ended before that"
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
