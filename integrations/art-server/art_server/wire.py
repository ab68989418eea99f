"""Groups as JSON and back, ids and logprobs included: what one machine collects another can score. Knows nothing about HTTP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from art_core.errors import ConfigError
from art_core.types import Call, Group, Sampling, Trajectory

_TUPLES = ("prompt_ids", "sampled_ids", "logprobs", "forced")


def group_to_wire(group: Group) -> dict[str, Any]:
    """Return a group as JSON has it."""
    return {
        "task": group.task,
        "trajectories": [_trajectory_to_wire(trajectory) for trajectory in group.trajectories],
        "advantages": group.advantages,
        "call_advantages": group.call_advantages,
    }


def group_from_wire(told: Mapping[str, Any]) -> Group:
    """Return the group that ``group_to_wire`` was given, of what JSON can say. Raises ConfigError for what is none."""
    try:
        return Group(
            told["task"],
            tuple(_trajectory_from_wire(it) for it in told["trajectories"]),
            tuple(told["advantages"]),
            tuple(tuple(of_run) for of_run in told["call_advantages"]),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"this is no group of runs ({error!r:.200}): install the same art-server on both sides"
        ) from error


def scores_to_wire(group: Group) -> dict[str, Any]:
    """Return what a group was scored as JSON has it: rewards by rollout, and advantages."""
    return {
        "trajectories": [
            {
                "rollout_id": t.rollout_id, "reward": t.reward, "metrics": t.metrics, "notes": t.notes,
                "call_rewards": {index: call.reward for index, call in enumerate(t.calls) if call.reward is not None},
            }
            for t in group.trajectories
        ],
        "advantages": group.advantages,
        "call_advantages": group.call_advantages,
    }  # fmt: skip


def sampling_from_wire(told: Mapping[str, Any] | None) -> Sampling | None:
    """Return the sampling; None where there was none."""
    return None if told is None else Sampling(**told)


def _trajectory_to_wire(trajectory: Trajectory) -> dict[str, Any]:
    fields = {it.name: getattr(trajectory, it.name) for it in dataclasses.fields(trajectory) if it.init}
    return {**fields, "calls": [_call_to_wire(call) for call in trajectory.calls]}


def _trajectory_from_wire(told: Mapping[str, Any]) -> Trajectory:
    return Trajectory(**{**told, "calls": tuple(_call_from_wire(call) for call in told["calls"])})


def _call_to_wire(call: Call) -> dict[str, Any]:
    return {it.name: getattr(call, it.name) for it in dataclasses.fields(call)}


def _call_from_wire(told: Mapping[str, Any]) -> Call:
    return Call(**{**told, **{name: tuple(told[name]) for name in _TUPLES}})
