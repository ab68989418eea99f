"""Scored runs as rows of a table. Knows nothing about W&B."""

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
"""Of one table, which is what one step or one evaluation gets."""
CHARACTERS = 2000
"""Of one cell."""


def rows(step: int, groups: Sequence[Group]) -> list[list[Any]]:
    """Return a row for each run, group after group, up to ``ROWS``."""
    runs = ((group, index, run) for group in groups for index, run in enumerate(group.trajectories))
    return [_row(step, group, index, run) for group, index, run in islice(runs, ROWS)]


def _row(step: int, group: Group, index: int, run: Trajectory) -> list[Any]:
    return [
        step,
        text(run.task),
        text(run.output),
        run.reward,
        group.advantages[index] if group.advantages else None,
        run.error and text(run.error),
        text(run.metrics),
        text("\n\n".join(f"{name}: {words}" for name, words in run.notes.items())),
        len(run.calls),
        sum(len(call.prompt_ids) for call in run.calls),
        sum(len(call.sampled_ids) for call in run.calls),
        run.seconds,
        run.rollout_id,
    ]


def text(value: Any) -> str:
    """Return a cell's text: words as they are, anything else as JSON, or where that cannot say it as its repr; of a
    long one the beginning."""
    shown = value if isinstance(value, str) else _as_json(value)
    more = len(shown) - CHARACTERS
    return shown if more <= 0 else f"{shown[:CHARACTERS]} [... {more} characters left out]"


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # keys that are no text, a circle, too deep
        return repr(value)
