"""Tasks: third-party suites, each with its own check as the reward and a reference agent, and those of your own traffic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_core import hookimpl
from art_core.plugin_api import Register

if TYPE_CHECKING:
    import typer


@hookimpl
def register_tasks(register: Register) -> None:
    """Register ``agentdojo``, ``bfcl``, ``human-eval`` and ``reasoning-gym``."""
    from art_tasks.agentdojo import AgentDojo
    from art_tasks.bfcl import Bfcl
    from art_tasks.human_eval import HumanEval
    from art_tasks.reasoning_gym import ReasoningGym

    register("agentdojo", AgentDojo())
    register("bfcl", Bfcl(), install=Bfcl.install)
    register("human-eval", HumanEval())
    register("reasoning-gym", ReasoningGym())


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``art tasks``."""
    from art_tasks.command import app as tasks

    app.add_typer(tasks, name="tasks")
