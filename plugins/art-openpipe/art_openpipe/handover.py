"""Converts a script's groups into art's groups, and records them in the run's store with the script's rewards."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from art_core.errors import ConfigError
from art_core.plugin_api import task_id
from art_core.types import Call, Group
from art_openpipe.record import Key, Record, copy_calls, key_of
from art_openpipe.trajectories import Trajectory, TrajectoryGroup


@dataclass
class Handover:
    """Adds a model's groups to its run."""

    record: Record
    split: str
    """``train``, or ``eval`` for all other splits of the script."""
    step: int
    _originals: dict[str, Trajectory] = field(default_factory=dict)
    """The script's trajectories by rollout id, without those of rollouts that failed before they created one."""

    async def groups(self, groups: Sequence[TrajectoryGroup]) -> list[Group]:
        """Return the groups with rewards and advantages; their calls are recorded under their rollouts.

        A failed rollout becomes a trajectory with ``error`` and without a reward, so it affects no other's advantage. In the
        split ``train``, raises CaptureError if a choice was not answered by this model.
        """
        choices = [choice for group in groups for trajectory in _members(group) for choice in trajectory.choices()]
        calls = await self.record.find(choices, strict=self.split == "train")
        if self.split == "train" and groups and not calls:
            raise ConfigError(
                "nothing to train: no trajectory has a choice in messages_and_choices. Append completion.choices[0], as "
                "model.openai_client() returned it, instead of its text"
            )
        converted = await asyncio.to_thread(lambda: [self._group(group, calls) for group in groups])
        return await self.record.run.score(converted, self)

    name = "openpipe"
    """The name under which scores are stored."""

    async def score(self, group: Group) -> list[float | None]:
        """Return the rewards of the script's trajectories, and add their metrics and logs to the rollouts."""
        rewards: list[float | None] = []
        for rollout in group.trajectories:
            original = self._originals.get(rollout.rollout_id)
            if original is None or rollout.error is not None:
                rollout.notes["unscored"] = rollout.error or "it has no trajectory"
                rewards.append(None)
                continue
            rollout.metrics.update({name: float(value) for name, value in original.metrics.items()})
            if original.logs:
                rollout.notes["logs"] = "\n".join(original.logs)
            rewards.append(original.reward)
        return rewards

    def _group(self, group: TrajectoryGroup, calls: Mapping[Key, Call]) -> Group:
        task, group_id, store = _task(group), uuid.uuid4().hex, self.record.run.store
        originals = [(trajectory, None) for trajectory in group.trajectories]
        originals += [(failed.trajectory, f"{failed.type}: {failed.message}") for failed in group.exceptions]
        members = []
        for original, error in originals:
            rollout_id = uuid.uuid4().hex
            store.add_rollout(
                rollout_id, task=task, step=self.step, split=self.split, task_id=task_id(task), group=group_id
            )
            seconds, output = 0.0, None
            if original is not None:
                self._originals[rollout_id] = original
                copy_calls(self.record.run, _calls_of(original, calls), rollout_id)
                seconds = float(original.metrics.get("duration", 0.0))
                output = original.metadata or None
            store.finish_rollout(rollout_id, output=output, error=error, seconds=seconds)
            members.append(rollout_id)
        return Group(task, tuple(store.trajectory(rollout_id) for rollout_id in members))


def _members(group: TrajectoryGroup) -> list[Trajectory]:
    return [*group.trajectories, *(failed.trajectory for failed in group.exceptions if failed.trajectory is not None)]


def _calls_of(trajectory: Trajectory, calls: Mapping[Key, Call]) -> list[Call]:
    """Return the calls of a trajectory's choices, each once, and set the trajectory's policy versions."""
    keys = dict.fromkeys(key_of(choice) for choice in trajectory.choices())
    recorded = [calls[key] for key in keys if key in calls]
    if recorded:
        versions = [call.policy_version for call in recorded]
        trajectory.initial_policy_version, trajectory.final_policy_version = min(versions), max(versions)
    return recorded


def _task(group: TrajectoryGroup) -> dict[str, Any]:
    """Return what the trajectories of a group have in common: the messages before the first choice, and the group's metadata."""
    first = next(iter(_members(group)), None)
    history = first.messages_and_choices if first else []
    prompt = next((index for index, item in enumerate(history) if not isinstance(item, dict)), len(history))
    return {"input": history[:prompt], **({"metadata": group.metadata} if group.metadata else {})}
