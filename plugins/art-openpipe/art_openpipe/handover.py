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
from art_openpipe.record import Key, Record, copy_calls
from art_openpipe.trajectories import Trajectory, TrajectoryGroup


@dataclass
class Handover:
    """Adds a model's groups to its run."""

    record: Record
    split: str  # train, or eval for all other splits of the script
    step: int
    _originals: dict[str, Trajectory] = field(default_factory=dict)  # the script's trajectories by rollout id

    async def groups(self, groups: Sequence[TrajectoryGroup]) -> list[Group]:
        """Return the groups with rewards and advantages; their calls are recorded under their rollouts.

        A failed rollout becomes a trajectory with ``error`` and without a reward, so it affects no other's advantage. In the
        split ``train``, raises CaptureError if a choice was not answered by this model.
        """
        choices = [choice for group in groups for each in group for choice in each.choices(self.record.model)]
        calls = await self.record.find(choices, strict=self.split == "train")
        if self.split == "train" and groups and not calls:
            for failed in (error for group in groups for error in group.exceptions if not len(group)):
                raise ConfigError(f"nothing to train: all rollouts of a group failed, one with {failed.traceback}")
            raise ConfigError(
                f"nothing to train: no trajectory has an exchange with {self.record.model!r}, or a choice. Capture it with "
                "art.trajectory(...), or append completion.choices[0] to messages_and_choices, instead of its text"
            )
        converted = await asyncio.to_thread(lambda: [self._group(group, calls) for group in groups])
        return await self.record.run.score(converted, self)

    name = "openpipe"

    async def score(self, group: Group) -> list[float | None]:
        """Return the rewards of the script's trajectories, and add their metrics and logs to the rollouts."""
        for rollout in group.trajectories:
            if original := self._originals.get(rollout.rollout_id):
                rollout.metrics.update({name: float(value) for name, value in original.metrics.items()})
                rollout.notes.update({"logs": "\n".join(original.logs)} if original.logs else {})
            else:
                rollout.notes["unscored"] = rollout.error or "it failed"
        originals = [self._originals.get(rollout.rollout_id) for rollout in group.trajectories]
        return [None if original is None else original.reward for original in originals]

    def _group(self, group: TrajectoryGroup, calls: Mapping[Key, Call]) -> Group:
        task, group_id, store = _task(group), uuid.uuid4().hex, self.record.run.store
        failures = [(None, f"{failed.type}: {failed.message}") for failed in group.exceptions]
        members = []
        for original, error in [*((trajectory, None) for trajectory in group), *failures]:
            rollout_id = uuid.uuid4().hex
            members.append(rollout_id)
            store.add_rollout(
                rollout_id, task=task, step=self.step, split=self.split, task_id=task_id(task), group=group_id
            )
            if original is None:
                store.finish_rollout(rollout_id, error=error)
                continue
            self._originals[rollout_id] = original
            copy_calls(self.record, original, calls, rollout_id)
            seconds = float(original.metrics.get("duration", 0.0))
            store.finish_rollout(rollout_id, output=original.metadata or None, seconds=seconds)
        return Group(task, tuple(store.trajectory(rollout_id) for rollout_id in members))


def _task(group: TrajectoryGroup) -> dict[str, Any]:
    """Return what the trajectories of a group have in common: the messages before the first choice, and the group's metadata."""
    history = group.trajectories[0].histories()[0].messages_and_choices if len(group) else []
    prompt = next((index for index, item in enumerate(history) if not isinstance(item, dict)), len(history))
    return {"input": history[:prompt], **({"metadata": group.metadata} if group.metadata else {})}
