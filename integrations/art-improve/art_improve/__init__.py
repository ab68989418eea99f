"""One budget for an agent that nobody changed: better prompts, then a teacher, then GRPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_core import hookimpl
from art_improve.improve import Contribution, Improvement, improve

if TYPE_CHECKING:
    import typer

__all__ = ["Contribution", "Improvement", "improve"]


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``art improve``."""
    from art_improve import command

    app.command(
        epilog="Example: `art improve app.py:agent tasks.jsonl --held-out held_out.jsonl --reward app.py:reward --model tiny "
        "--rollouts 2000 --reflector openai/gpt-6-luna`"
    )(command.improve)
