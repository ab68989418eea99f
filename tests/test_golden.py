"""Compares the golden run with what ``golden_run.py`` recorded."""

import json

import golden_run
import pytest


def recorded(name):
    return (golden_run.GOLDEN / name).read_text()


@pytest.mark.system
@pytest.mark.smoke
def test_two_steps_of_the_email_agent_leave_what_they_always_left(tmp_path):
    now, then = golden_run.trained(tmp_path / "run"), json.loads(recorded("run.json"))
    assert now["rows"] == then["rows"]
    assert now["report"] == then["report"]
    for step, before in zip(now["metrics"], then["metrics"], strict=True):
        assert step == pytest.approx(before, rel=1e-4, abs=1e-6)
    # By sums, because processors add in different orders, and the optimizer makes a step even of a gradient that is nearly zero.
    assert now["weights"] == pytest.approx(then["weights"], rel=1e-3)


def test_the_public_surface_is_called_as_ever():
    assert golden_run.surface() == recorded("surface.txt")


def test_every_command_helps_as_ever():
    assert golden_run.helps() == recorded("help.txt")
