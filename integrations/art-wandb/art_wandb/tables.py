"""Scored rollouts as rows of a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

from art_core.types import Group, Trajectory

COLUMNS = [
    "step", "task", "output", "reward", "advantage", "error", "metrics", "notes", "calls", "prompt_tokens", "sampled_tokens",
    "seconds", "rollout_id",
]  # fmt: skip
ROWS = 64
"""Most rows in a table; each step and each evaluation has one table."""
CHARACTERS = 2000
"""Most characters in a cell."""


def rows(step: int, groups: Sequence[Group]) -> list[list[Any]]:
    """Return a row for each rollout, group after group, up to ``ROWS``."""
    rollouts = ((group, index, rollout) for group in groups for index, rollout in enumerate(group.trajectories))
    return [_row(step, group, index, rollout) for group, index, rollout in islice(rollouts, ROWS)]


def _row(step: int, group: Group, index: int, rollout: Trajectory) -> list[Any]:
    tokens = [call.token_counts() or (0, 0) for call in rollout.calls]
    return [
        step,
        text(rollout.task),
        text(rollout.output),
        rollout.reward,
        group.advantages[index] if group.advantages else None,
        rollout.error and text(rollout.error),
        text(rollout.metrics),
        text("\n\n".join(f"{name}: {note}" for name, note in rollout.notes.items())),
        len(rollout.calls),
        sum(prompt for prompt, _ in tokens),
        sum(sampled for _, sampled in tokens),
        rollout.seconds,
        rollout.rollout_id,
    ]


def text(value: Any) -> str:
    """Return a cell's text: strings unchanged, other values as JSON or else their repr; long texts are truncated."""
    shown = value if isinstance(value, str) else _as_json(value)
    excess = len(shown) - CHARACTERS
    return shown if excess <= 0 else f"{shown[:CHARACTERS]} [... {excess} characters left out]"


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are not strings, a cycle, too deep
        return repr(value)
