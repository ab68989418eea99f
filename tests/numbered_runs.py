"""Settings of runs whose answers are numbers, and what such a run wrote."""

import json

from art_core.store import Store
from art_core.testing import CountingLearner, FakeEngine


class Numbers:
    """Answer every request with its number, so that the runs of a group differ."""

    def __init__(self):
        self.count = 0

    def __call__(self, request):
        self.count += 1
        return str(self.count)


def number(trajectory):
    """Give every run of a group its own reward, so that no step is without contrast whatever the order of the calls."""
    return float(trajectory.output)


def settings(tmp_path, **more):
    return {
        "model": "tiny", "steps": 4, "tasks_per_step": 2, "group_size": 4, "engine": FakeEngine(Numbers()),
        "learner": CountingLearner(), "run_dir": tmp_path / "run", "reward": number, "progress": False, **more,
    }  # fmt: skip


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def stored(tmp_path):
    with Store(tmp_path / "run" / "run.sqlite") as store:
        return [(rollout, store.calls(rollout.rollout_id)) for rollout in store.rollouts()]
