"""Values as a store gives them -> values that any reader of JSON takes. Agents say strange things: NaN, halves of surrogate
pairs, lists in lists without end. Knows nothing about runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

DEEPEST = 60
"""Levels that are shown; what is deeper is an ellipsis."""
EXACT = 2**53
"""Whole numbers from here on are not the same in a browser, so they are given as text."""


def plain(value: Any, depth: int = DEEPEST) -> Any:
    """Return a JSON value without what JSON or UTF-8 cannot say."""
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if -EXACT <= value <= EXACT else str(value)
    if depth == 0:
        return "…"
    if isinstance(value, Mapping):
        return {readable(str(key)): plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth - 1) for item in value]
    return readable(str(value))


def readable(text: str) -> str:
    """Return text as UTF-8 can say it."""
    return text.encode("utf-8", "replace").decode("utf-8")


def numbers(metrics: Any) -> dict[str, float | None]:
    """Return the metrics that are numbers; None for those that JSON cannot say."""
    if not isinstance(metrics, Mapping):
        return {}
    return {
        readable(str(name)): float(value) if math.isfinite(value) else None
        for name, value in metrics.items()
        if isinstance(value, int | float)
    }
