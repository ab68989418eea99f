"""Groups as scripts build them -> art's groups, in the run's store, scored as the script said. Knows nothing about learning."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from art_core.errors import ConfigError
from art_core.loop.rollout import task_id
from art_core.types import Call, Group
from art_openpipe.record import Key, Record, copied, key_of
from art_openpipe.trajectories import Trajectory, TrajectoryGroup


@dataclass
class Handover:
    """Takes groups of one model over into its run."""

    record: Record
    split: str
    """``train``, or ``eval`` for every other split of the script's."""
    step: int
    _given: dict[str, Trajectory] = field(default_factory=dict)
    """By the rollout that it became; a run that failed without a trajectory is not here."""

    async def groups(self, groups: Sequence[TrajectoryGroup]) -> list[Group]:
        """Return the groups with their rewards and advantages; what was said in them is recorded under them.

        A rollout that failed is a trajectory with ``error`` and without a reward: it moves no other's advantage. Raises
        CaptureError, for what is to be trained, where a choice was not answered by this model.
        """
        choices = [it for group in groups for t in _members(group) for it in t.choices()]
        calls = await self.record.find(choices, strict=self.split == "train")
        if self.split == "train" and groups and not calls:
            raise ConfigError(
                "there is nothing to train: no trajectory has a choice in messages_and_choices. Append completion.choices[0], "
                "as model.openai_client() returned it, instead of its text"
            )
        found = await asyncio.to_thread(lambda: [self._group(group, calls) for group in groups])
        return await self.record.run.score(found, self)

    name = "openpipe"
    """Under which scores are kept."""

    async def score(self, group: Group) -> list[float | None]:
        """Return what the script's trajectories are worth; the run's store gets their metrics and lines, too."""
        rewards: list[float | None] = []
        for run in group.trajectories:
            given = self._given.get(run.rollout_id)
            if given is None or run.error is not None:
                run.notes["unscored"] = run.error or "it has no trajectory"
                rewards.append(None)
                continue
            run.metrics.update({name: float(value) for name, value in given.metrics.items()})
            if given.logs:
                run.notes["logs"] = "\n".join(given.logs)
            rewards.append(given.reward)
        return rewards

    def _group(self, group: TrajectoryGroup, calls: Mapping[Key, Call]) -> Group:
        task, group_id, store = _task(group), uuid.uuid4().hex, self.record.run.store
        runs = [(it, None) for it in group.trajectories]
        runs += [(it.trajectory, f"{it.type}: {it.message}") for it in group.exceptions]
        members = []
        for given, error in runs:
            rollout_id = uuid.uuid4().hex
            store.add_rollout(
                rollout_id, task=task, step=self.step, split=self.split, task_id=task_id(task), group=group_id
            )
            seconds, output = 0.0, None
            if given is not None:
                self._given[rollout_id] = given
                copied(self.record.run, _calls_of(given, calls), rollout_id)
                seconds = float(given.metrics.get("duration", 0.0))
                output = given.metadata or None
            store.finish_rollout(rollout_id, output=output, error=error, seconds=seconds)
            members.append(rollout_id)
        return Group(task, tuple(store.trajectory(rollout_id) for rollout_id in members))


def _members(group: TrajectoryGroup) -> list[Trajectory]:
    return [*group.trajectories, *(it.trajectory for it in group.exceptions if it.trajectory is not None)]


def _calls_of(given: Trajectory, calls: Mapping[Key, Call]) -> list[Call]:
    """Return the calls of a trajectory's choices, each once, and note in it which weights answered."""
    keys = dict.fromkeys(key_of(choice) for choice in given.choices())
    found = [calls[key] for key in keys if key in calls]
    if found:
        versions = [call.policy_version for call in found]
        given.initial_policy_version, given.final_policy_version = min(versions), max(versions)
    return found


def _task(group: TrajectoryGroup) -> dict[str, Any]:
    """Return what the runs of a group have in common: the messages before the first choice, and the group's metadata."""
    first = next(iter(_members(group)), None)
    given = first.messages_and_choices if first else []
    asked = next((place for place, it in enumerate(given) if not isinstance(it, dict)), len(given))
    return {"input": given[:asked], **({"metadata": group.metadata} if group.metadata else {})}
