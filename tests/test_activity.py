"""The activity of calls: how many ended, which are open, and how long nothing has moved."""

import asyncio
from types import SimpleNamespace

import pytest

from art_core.capture import Gate
from art_core.capture.admission import CallActivity


@pytest.fixture
def clock(monkeypatch):
    """Time that passes when the test says so."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("art_core.capture.admission.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_calls_are_counted_by_rollout_and_the_oldest_open_one_is_timed(clock):
    activity, gate = CallActivity(), Gate()
    assert activity.snapshot(gate).rollouts == {}
    with activity.call("a"):
        clock.now += 5
        with activity.call("a"), activity.call("b"):
            clock.now += 2
            assert activity.snapshot(gate).rollouts == {"a": (0, 7.0), "b": (0, 2.0)}
        assert activity.snapshot(gate).rollouts == {"a": (1, 7.0), "b": (1, None)}
    assert activity.snapshot(gate).rollouts == {"a": (2, None), "b": (1, None)}


def test_quiet_is_the_time_since_the_last_progress(clock):
    activity, gate = CallActivity(), Gate()
    clock.now += 3
    assert activity.snapshot(gate).quiet == 3.0
    with activity.call("a"):
        clock.now += 1
        assert activity.snapshot(gate).quiet == 4.0, "that one has come is no answer"
        activity.note_progress()
        assert activity.snapshot(gate).quiet == 0.0
        clock.now += 2
    assert activity.snapshot(gate).quiet == 0.0, "it has ended"


def test_a_failed_call_counts_as_ended(clock):
    activity, gate = CallActivity(), Gate()
    with pytest.raises(ValueError), activity.call("a"):
        raise ValueError
    assert activity.snapshot(gate).rollouts == {"a": (1, None)}


def test_a_closed_rollout_is_forgotten(clock):
    activity, gate = CallActivity(), Gate()
    for name in ("a", "b"):
        with activity.call(name):
            pass
    activity.forget("a")
    activity.forget("nobody")
    assert activity.snapshot(gate).rollouts == {"b": (1, None)}


async def test_calls_that_the_gate_holds_are_counted(clock):
    activity, gate = CallActivity(), Gate()
    await gate.pause()
    held = asyncio.create_task(gate.__aenter__())
    await asyncio.sleep(0)
    assert activity.snapshot(gate).waiting == 1
    held.cancel()
