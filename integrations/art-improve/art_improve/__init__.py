"""One budget for an agent that nobody changed: better prompts, then a teacher, then GRPO. Further rounds by its traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from art_core import hookimpl
from art_improve.improve import Contribution, Improvement, improve

if TYPE_CHECKING:
    import typer

    from art_improve.history import Round
    from art_improve.rounds import retrain

__all__ = ["Contribution", "Improvement", "Round", "improve", "retrain"]


def __getattr__(name: str) -> Any:
    """Import what reads traffic when it is first used: every ``art`` command imports this module."""
    if name not in ("Round", "retrain"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from art_improve import rounds

    return getattr(rounds, name)


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``art improve`` and ``art retrain``."""
    from art_improve import command, retrain_command

    app.command(
        epilog="Example: `art improve app.py:agent tasks.jsonl --held-out held_out.jsonl --reward app.py:reward --model tiny "
        "--rollouts 2000 --reflector openai/gpt-6-luna`"
    )(command.improve)
    app.command(
        epilog="Example: `art retrain app.py:agent runs/production --reward app.py:reward --model runs/mine --tasks tasks.jsonl "
        "--held-out held_out.jsonl`"
    )(retrain_command.retrain)
