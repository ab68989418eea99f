"""Markdown tables of numbers, and the choice of their rows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Made = TypeVar("Made")


def shown(value: object) -> str:
    """Return a cell: three significant digits for a float, ``-`` for None and NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table with aligned columns."""
    cells = [list(head), *([shown(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def wanted(name: str, skip: str) -> bool:
    """Return whether ``name`` contains none of the comma-separated words ``skip``; "padded" doesn't match "unpadded"."""
    return not any(word and re.search(rf"\b{re.escape(word)}\b", name) for word in skip.split(","))


def unless_left_out(name: str, skip: str, make: Callable[..., Made], *arguments: Any) -> Made | None:
    """Return what ``make`` makes of ``arguments``; None if ``name`` is not wanted or its library is missing, which is printed."""
    if not wanted(name, skip):
        return None
    try:
        return make(*arguments)
    except ImportError as error:
        print(f"left out: {name}, because {error}", flush=True)
        return None
