"""Checks that a run trained exactly the tokens it sampled. Reads the run folder and changes nothing in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_audit import command
from art_audit.audit import audit
from art_audit.report import Audit, Problem
from art_core import hookimpl

if TYPE_CHECKING:
    import typer

__all__ = ["Audit", "Problem", "audit"]


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``art audit``."""
    app.command(epilog="Example: `art audit runs/my-run --sample 200`")(command.audit)
