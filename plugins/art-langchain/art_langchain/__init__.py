"""Runs LangChain runnables, and has the policy answer for their chat models."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from art_core import hookimpl

if TYPE_CHECKING:
    from art_core.types import RolloutAddress, RunAgent


@hookimpl
def adapt_agent(agent: object) -> RunAgent | None:
    """Run a runnable with ``ainvoke``; None for anything else."""
    # If LangChain has not been imported, this can't be one of its runnables.
    runnables = sys.modules.get("langchain_core.runnables.base")
    if runnables is None or not isinstance(agent, runnables.Runnable):
        return None

    async def run(input: Any, address: RolloutAddress) -> Any:
        return await agent.ainvoke(input)

    return run


@hookimpl
def redirect_clients() -> None:
    """Have the policy answer for chat models inside a rollout."""
    from art_langchain.models import redirect

    redirect()
