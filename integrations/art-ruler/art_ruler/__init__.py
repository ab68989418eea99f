"""Rewards without a reward function: an LLM judge compares the rollouts of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_core import hookimpl
from art_core.plugin_api import Register
from art_ruler.criteria import RULERRewardSystem
from art_ruler.judge import Answer
from art_ruler.prompt import RUBRIC
from art_ruler.ruler import Ruler

if TYPE_CHECKING:
    import typer

__all__ = ["RUBRIC", "Answer", "RULERRewardSystem", "Ruler"]


@hookimpl
def register_rewards(register: Register) -> None:
    """Register ``reward="ruler"``."""
    register("ruler", Ruler)


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``art judge``."""
    from art_ruler.command import add_to

    add_to(app)
