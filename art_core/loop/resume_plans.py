"""What is recorded of a group already: rollouts that are part of it, and interrupted ones that new rollouts can continue."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from art_core.errors import CaptureError, RolloutLost, UpstreamError
from art_core.loop.rollout import task_id
from art_core.store import Attempt, Store
from art_core.types import Trajectory

MOST_CONTINUED = 8
"""Rollouts in a chain of continued ones before the agent starts from scratch: a recorded answer may be what ends the process."""
NOT_THE_AGENTS = tuple(error.__name__ for error in (RolloutLost, asyncio.CancelledError, CaptureError, UpstreamError))
"""How stored errors begin that the agent did not cause: its machine was lost, we were stopped, or recording failed."""


@dataclass(frozen=True)
class ResumePlan:
    """What is recorded of one group already; empty for a new group."""

    group_id: str
    finished: Sequence[Trajectory] = ()
    """Part of the group as they are."""
    resumable: Sequence[str] = ()
    """Interrupted rollouts that new ones can continue, each once; most answers first."""


def resume_plans(
    store: Store, key: str | None, tasks: Sequence[Any], size: int, scored_by: str | None = None
) -> list[ResumePlan]:
    """Plan a group of ``size`` rollouts per task, from what earlier calls and processes recorded under the same key.

    Without a key all groups are new. ``scored_by`` names the reward: groups that it has scored keep their rewards.
    """
    if key is None:
        return [ResumePlan(uuid.uuid4().hex) for _ in tasks]
    return [_resume_plan(store, group_id(key, index), task, size, scored_by) for index, task in enumerate(tasks)]


def group_id(key: str, index: int) -> str:
    """Return the id of the group of the task at ``index`` among those collected under ``key``."""
    return f"{key}/{index}"


def finished_trajectories(store: Store, group_id: str) -> list[Trajectory]:
    """Return the rollouts of a group that ended, failed or not; of one that was continued, the last."""
    attempts = store.attempts(group_id)
    continued = {attempt.continues for attempt in attempts}
    ended = [attempt for attempt in attempts if _has_ended(attempt) and attempt.rollout_id not in continued]
    return [store.trajectory(attempt.rollout_id) for attempt in ended]


def _resume_plan(store: Store, group_id: str, task: Any, size: int, scored_by: str | None) -> ResumePlan:
    def read(attempt: Attempt) -> Trajectory:
        return replace(store.trajectory(attempt.rollout_id), task=task)

    attempts = [attempt for attempt in store.attempts(group_id) if attempt.task_id == task_id(task)]
    # However they ended: the group may have been trained, and is then trained again as it was.
    scored = [attempt for attempt in attempts if scored_by is not None and attempt.scored_by == scored_by]
    if len(scored) >= size:
        return ResumePlan(group_id, [read(attempt) for attempt in scored[:size]])
    # A rollout without answers costs nothing to repeat, and its agent may have been fixed. An output that JSON cannot hold is
    # made again from the recorded answers: a reward may look at it.
    ended = [attempt for attempt in attempts if _has_ended(attempt) and attempt.answers and attempt.exact][:size]
    finished = [_without_scores(read(attempt)) for attempt in ended]
    return ResumePlan(group_id, finished, _resumable(attempts, {attempt.rollout_id for attempt in ended}))


def _without_scores(trajectory: Trajectory) -> Trajectory:
    calls = tuple(replace(call, reward=None) for call in trajectory.calls)
    return replace(trajectory, reward=None, metrics={}, notes={}, calls=calls)


def _has_ended(attempt: Attempt) -> bool:
    return attempt.finished and not (attempt.error or "").startswith(NOT_THE_AGENTS)


def _resumable(attempts: Sequence[Attempt], used: set[str]) -> list[str]:
    """Return the rollout with the most answers of every chain of continued rollouts that is not used, most answers first."""
    chains: dict[str | None, list[Attempt]] = {}
    for attempt in attempts:
        chain = chains[attempt.rollout_id] = chains.get(attempt.continues, [])
        chain.append(attempt)
    furthest = [
        max(reversed(chain), key=lambda attempt: attempt.answers)  # among equals the last: it had all earlier answers
        for rollout_id, chain in chains.items()
        if rollout_id == chain[0].rollout_id
        and len(chain) <= MOST_CONTINUED
        and used.isdisjoint(attempt.rollout_id for attempt in chain)
    ]
    return [attempt.rollout_id for attempt in sorted(furthest, key=lambda attempt: attempt.answers, reverse=True)]
