"""Rows of rollouts and scores -> what is read of them. Knows nothing about how they are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple

from art_core.store.values import column, from_json, object_from_json, text_from_column
from art_core.types import Call, Trajectory

COLUMNS = (
    "rollouts.rollout_id, step, split, task_id, task, grp, finished, output, error, seconds, "
    "reward, metrics, notes, advantage"
)
"""What ``rollout_of`` reads."""
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
SHAPES = f"""
SELECT rollouts.rollout_id, coalesce(grp, rollouts.rollout_id), task_id, error IS NOT NULL, scores.reward, count(calls.seq),
    coalesce(sum(length(sampled)), 0) / 4, coalesce(sum(finish_reason = 'length'), 0),
    (SELECT sampled FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND NOT replaced ORDER BY seq DESC LIMIT 1)
FROM {SCORED} LEFT JOIN calls ON calls.rollout_id = rollouts.rollout_id AND NOT replaced
WHERE step = ? AND split = ? AND finished IS NOT NULL AND scores.reward IS NOT NULL GROUP BY rollouts.seq
"""
SCORES = "SELECT reward, metrics, notes, advantage, scored_by, at, aside FROM scores WHERE rollout_id = ? ORDER BY seq"


@dataclass(frozen=True)
class StoredRollout:
    """What is known of one run of the agent, without its calls."""

    rollout_id: str
    step: int | None
    split: str | None
    """``train`` or ``eval``, or what the caller named it."""
    task_id: str | None
    task: Any
    group: str | None
    """The runs of one task that are compared have the same."""
    finished: bool
    output: Any = None
    error: str | None = None
    seconds: float = 0.0
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    advantage: float | None = None
    """Reward, metrics, notes and advantage are of the newest score that is not ``aside``."""


class Shape(NamedTuple):
    """What a scored run of the agent looks like from afar: of its calls only the sizes are read, and the last answer."""

    rollout_id: str
    group: str
    task_id: str | None
    failed: bool
    reward: float
    calls: int
    sampled_tokens: int
    cut_off: int
    """Calls that ended at their token limit."""
    answer: bytes | None
    """The ids that were sampled in the last call, as they are stored; None where there is none."""


@dataclass(frozen=True)
class Attempt:
    """What is known of one run of the agent when it is asked whether it must be made again."""

    rollout_id: str
    task_id: str | None
    finished: bool
    error: str | None
    exact: bool
    """Whether the stored output is the very value that the agent returned."""
    continues: str | None
    """The rollout whose answers it began with."""
    scored_by: str | None
    """The reward that gave the newest score that is not aside; None where that gave no reward."""
    answers: int
    """Calls that were answered to their end."""


@dataclass(frozen=True)
class StoredScore:
    """What one scoring gave a rollout."""

    reward: float | None
    metrics: dict[str, float]
    notes: dict[str, str]
    advantage: float | None
    by: str | None
    """The reward's name."""
    at: float
    """Unix time."""
    aside: bool
    """A second opinion: it never counts as the rollout's reward."""


def rollout_of(row: tuple) -> StoredRollout:
    """Return what a row of ``COLUMNS`` says. Raises Damaged."""
    (
        rollout_id, step, split, task_id, task, group, finished, output, error, seconds, reward, metrics, notes, advantage,
    ) = row  # fmt: skip
    return StoredRollout(
        rollout_id=column(rollout_id, str),
        step=column(step, int, NoneType),
        split=column(split, str, NoneType),
        task_id=column(task_id, str, NoneType),
        task=from_json(task),
        group=column(group, str, NoneType),
        finished=finished is not None,
        output=None if output is None else from_json(output),
        error=text_from_column(error),
        seconds=column(seconds, float, NoneType) or 0.0,
        reward=column(reward, float, NoneType),
        metrics=object_from_json(metrics),
        notes=object_from_json(notes),
        advantage=column(advantage, float, NoneType),
    )


def attempt_of(row: tuple) -> Attempt:
    """Return what a row of ``ATTEMPTS`` says."""
    rollout_id, task_id, finished, error, exact, continues, scored_by, answers = row
    return Attempt(
        rollout_id, task_id, bool(finished), text_from_column(error), bool(exact), continues, scored_by, answers
    )


def score_of(row: tuple) -> StoredScore:
    """Return what a row of ``SCORES`` says. Raises Damaged."""
    reward, metrics, notes, advantage, by, at, aside = row
    return StoredScore(
        column(reward, float, NoneType), object_from_json(metrics), object_from_json(notes),
        column(advantage, float, NoneType), column(by, str, NoneType), column(at, float), bool(aside),
    )  # fmt: skip


def trajectory_of(rollout: StoredRollout, calls: tuple[Call, ...]) -> Trajectory:
    """Return a rollout with its calls."""
    return Trajectory(
        task=rollout.task,
        calls=calls,
        output=rollout.output,
        reward=rollout.reward,
        metrics=rollout.metrics,
        error=rollout.error,
        rollout_id=rollout.rollout_id,
        seconds=rollout.seconds,
        notes=rollout.notes,
    )
