"""Rows of rollouts, scores and optimizer steps -> dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from art_core.store.digest import SIZE
from art_core.store.values import from_json, object_from_json
from art_core.types import Call, Trajectory

COLUMNS = (
    "rollouts.rollout_id, step, split, task_id, task, grp, finished, output, error, seconds, "
    "reward, metrics, notes, advantage"
)
"""The fields of ``StoredRollout``."""
SCORED = """
rollouts LEFT JOIN scores
    ON scores.seq = (SELECT max(seq) FROM scores WHERE scores.rollout_id = rollouts.rollout_id AND NOT aside)
"""
ROLLOUTS = f"SELECT {COLUMNS} FROM {SCORED}"
ATTEMPTS = f"""
SELECT rollouts.rollout_id, task_id, finished IS NOT NULL, error, coalesce(exact, 0), continues,
    CASE WHEN reward IS NOT NULL THEN scored_by END,
    (SELECT count(*) FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND finish_reason != 'aborted')
FROM {SCORED} WHERE grp = ? ORDER BY rollouts.seq
"""
SCORES = "SELECT reward, metrics, notes, advantage, scored_by, at, aside FROM scores WHERE rollout_id = ? ORDER BY seq"
UPDATE = "SELECT step, version, targets, trained FROM updates WHERE seq = ?"


@dataclass(frozen=True)
class StoredRollout:
    """A rollout without its calls."""

    rollout_id: str
    step: int | None
    split: str | None
    """``train``, ``eval``, or a name of the caller's."""
    task_id: str | None
    task: Any
    group: str | None
    """Shared by the rollouts of one task whose rewards are compared."""
    finished: bool
    output: Any = None
    error: str | None = None
    seconds: float = 0.0
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    advantage: float | None = None
    """Reward, metrics, notes and advantage are those of the newest score that is not ``aside``."""


@dataclass(frozen=True)
class Attempt:
    """What decides whether a rollout can be used again or resumed."""

    rollout_id: str
    task_id: str | None
    finished: bool
    error: str | None
    exact: bool
    """Whether the stored output is exactly what the agent returned."""
    continues: str | None
    """The rollout whose answers it replayed first."""
    scored_by: str | None
    """Name of the reward that gave the newest score that is not aside; None if it gave no number."""
    answers: int
    """Calls that were not aborted."""


@dataclass(frozen=True)
class StoredScore:
    """One score of a rollout."""

    reward: float | None
    metrics: dict[str, float]
    notes: dict[str, str]
    advantage: float | None
    by: str | None
    """The reward's name."""
    at: float
    """Unix time."""
    aside: bool
    """A second opinion, which never counts as the rollout's reward."""


@dataclass(frozen=True)
class Update:
    """The input of one optimizer step."""

    step: int
    version: int
    """Of the weights that it made."""
    targets: float | None
    """Trained tokens, if the learner counts them."""
    trained: tuple[tuple[str | None, tuple[bytes, ...]], ...]
    """Per trajectory its rollout's id, None if this file lacks the rollout, and ``call_digest`` of each of its calls."""


def rollout_of(*row: Any) -> StoredRollout:
    """Return what a row of ``COLUMNS`` says."""
    rollout = StoredRollout(*row)
    return replace(
        rollout,
        task=from_json(rollout.task),
        finished=rollout.finished is not None,
        output=None if rollout.output is None else from_json(rollout.output),
        seconds=rollout.seconds or 0.0,
        metrics=object_from_json(rollout.metrics),
        notes=object_from_json(rollout.notes),
    )


def score_of(*row: Any) -> StoredScore:
    """Return what a row of ``SCORES`` says."""
    score = StoredScore(*row)
    metrics, notes = object_from_json(score.metrics), object_from_json(score.notes)
    return replace(score, metrics=metrics, notes=notes, aside=bool(score.aside))


def update_of(step: int, version: int, targets: float | None, trained: bytes) -> Update:
    """Return what a row of ``UPDATE`` says."""
    return Update(step, version, targets, tuple((name, _digests(joined)) for name, joined in from_json(trained)))


def _digests(joined: str) -> tuple[bytes, ...]:
    data = bytes.fromhex(joined)
    return tuple(data[at : at + SIZE] for at in range(0, len(data), SIZE))


def trajectory_of(rollout: StoredRollout, calls: tuple[Call, ...]) -> Trajectory:
    """Return a rollout with its calls."""
    names = ("task", "output", "reward", "metrics", "error", "rollout_id", "seconds", "notes")
    return Trajectory(calls=calls, **{name: getattr(rollout, name) for name in names})
