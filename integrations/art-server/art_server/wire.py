"""Groups <-> JSON, with ids and logprobs, so that one machine can score what another has collected."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from art_core.errors import ConfigError
from art_core.types import Call, Group, Sampling, Trajectory

_TUPLES = ("prompt_ids", "sampled_ids", "logprobs", "forced")


def group_to_wire(group: Group) -> dict[str, Any]:
    """Return a group as JSON values."""
    return {
        "task": group.task,
        "trajectories": [_trajectory_to_wire(trajectory) for trajectory in group.trajectories],
        "advantages": group.advantages,
        "call_advantages": group.call_advantages,
    }


def group_from_wire(fields: Mapping[str, Any]) -> Group:
    """Return the group from the result of ``group_to_wire``. Raises ConfigError if it isn't one."""
    try:
        return Group(
            fields["task"],
            tuple(_trajectory_from_wire(trajectory) for trajectory in fields["trajectories"]),
            tuple(fields["advantages"]),
            tuple(map(tuple, fields["call_advantages"])),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"can't read the group from the server ({error!r:.200}): install the same art-server on both sides"
        ) from error


def scores_to_wire(group: Group) -> dict[str, Any]:
    """Return a group's scores as JSON values: rewards by rollout, and advantages."""
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


def sampling_from_wire(fields: Mapping[str, Any] | None) -> Sampling | None:
    """Return the sampling; None stays None."""
    return None if fields is None else Sampling(**fields)


def _trajectory_to_wire(trajectory: Trajectory) -> dict[str, Any]:
    fields = {field.name: getattr(trajectory, field.name) for field in dataclasses.fields(trajectory) if field.init}
    return {**fields, "calls": [_call_to_wire(call) for call in trajectory.calls]}


def _trajectory_from_wire(fields: Mapping[str, Any]) -> Trajectory:
    return Trajectory(**{**fields, "calls": tuple(_call_from_wire(call) for call in fields["calls"])})


def _call_to_wire(call: Call) -> dict[str, Any]:
    return {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}


def _call_from_wire(fields: Mapping[str, Any]) -> Call:
    return Call(**{**fields, **{name: tuple(fields[name]) for name in _TUPLES}})
