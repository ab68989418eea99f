"""A training that is killed at random moments comes to what one comes to that is not. ``LONG=whole`` kills it 100 times."""

import os
import random
from collections import Counter

import pytest
import warm
from kill_loop import VICTIMS, Training, cold, facts, kill_loop

WHOLE = os.environ.get("LONG") == "whole"


@pytest.mark.long
@pytest.mark.timeout(4 * 3600 if WHOLE else 1200)
def test_a_training_that_is_killed_again_and_again_loses_nothing(tmp_path):
    steps, kills, eval_tasks = (50, 100, 300) if WHOLE else (3, 6, 20)
    training = Training(tmp_path / "killed", steps, eval_tasks, seed=0, program=cold if WHOLE else warm.program)
    kill_loop(training, kills, span=3.0, rng=random.Random(0), say=lambda *_, **__: None)
    found = facts(training.run_dir)
    print(f"{len(training.kills)} kills: {dict(Counter(training.kills))}\n{found}")
    assert training.kills and {victim for _, victim in training.kills} <= set(VICTIMS)
    assert (found.steps, found.groups, found.trajectories) == (steps, steps * 8, steps * 8 * 8)
    assert training.lost == 0, "calls that were in the store are gone"
    assert found.remade == 0, "answers that an agent had were sampled anew"
    if WHOLE:
        reference = Training(tmp_path / "reference", steps, eval_tasks, seed=0)
        assert reference.whole() == 0
        low, high = facts(reference.run_dir).interval
        assert low <= found.success <= high
