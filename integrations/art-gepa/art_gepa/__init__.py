"""Better prompts for an agent that nobody changed, with the library GEPA: ``art optimize``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_core import hookimpl
from art_gepa.components import Component, components
from art_gepa.plugins import WithPrompts
from art_gepa.prompts import Change
from art_gepa.search import Result, optimize

if TYPE_CHECKING:
    import typer

__all__ = ["Change", "Component", "Result", "WithPrompts", "components", "optimize"]


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``art optimize``."""
    from art_gepa import command

    app.command(
        epilog="Example: `art optimize app.py:agent tasks.jsonl --reward app.py:reward --model live --reflector "
        "openai/gpt-6-luna`"
    )(command.optimize)
