"""Rows of rollouts and scores -> what is read of them. Knows nothing about how they are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import NoneType
from typing import Any

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
