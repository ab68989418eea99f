"""Compares evaluations task by task, and decides whether a model may replace another. Reads run folders, and changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_compare import command
from art_compare.comparison import Comparison, Difference, compare
from art_compare.gate import Verdict
from art_core import hookimpl

if TYPE_CHECKING:
    import typer

__all__ = ["Comparison", "Difference", "Verdict", "compare"]


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``art compare``."""
    app.command(
        epilog="Examples: `art compare runs/my-run`; "
        "`art compare live=runs/live mine=runs/my-run --gate 'success >= live - 0.02'`; "
        "`art compare live runs/my-run --agent app.py:agent --tasks held_out.jsonl --reward app.py:reward`"
    )(command.compare)
