"""Converts stored values to JSON that any client can read.

Agents may return NaN, lone surrogates and very deeply nested lists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 60
"""Nesting levels that are shown; deeper values become an ellipsis."""
EXACT = 2**53
"""Browsers round integers above this, so they are converted to strings."""


def plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """Return ``value`` as a JSON value without anything that JSON or UTF-8 can't express."""
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
    """Return ``text`` with "?" for lone surrogates, which UTF-8 can't encode."""
    return text.encode("utf-8", "replace").decode("utf-8")


def numbers(metrics: Any) -> dict[str, float | None]:
    """Return the numeric metrics; None for NaN and infinite ones."""
    if not isinstance(metrics, Mapping):
        return {}
    return {
        readable(str(name)): float(value) if math.isfinite(value) else None
        for name, value in metrics.items()
        if isinstance(value, int | float)
    }
