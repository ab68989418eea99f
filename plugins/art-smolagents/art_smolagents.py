"""The plugin for smolagents: a function that makes an agent is an agent, and model calls have the agent's name."""

from __future__ import annotations

import asyncio
from typing import Any

from art_core import hookimpl, when_imported
from art_core.types import RolloutAddress, RunAgent
from art_http.frameworks import is_a, name_while, refuse_shared


@hookimpl
def adapt_agent(agent: object, shared: bool) -> RunAgent | None:
    """Run a ``CodeAgent``, a ``ToolCallingAgent`` or another one with a task; the output is what ``run`` returns."""
    if not is_a(agent, "smolagents.MultiStepAgent"):
        return None
    if shared:
        refuse_shared(agent)

    async def run(task_input: Any, address: RolloutAddress) -> Any:
        arguments = task_input if isinstance(task_input, dict) else {"task": task_input}
        return await asyncio.to_thread(agent.run, **arguments)

    return run


@hookimpl
def redirect_clients() -> None:
    """Name the agent that is calling."""
    when_imported("smolagents.agents", _name_agents)


def _name_agents(module: Any) -> None:
    # Which ``run`` and its streams go through.
    name_while(module.MultiStepAgent, "_run_stream", lambda agent: agent.name or type(agent).__name__)
