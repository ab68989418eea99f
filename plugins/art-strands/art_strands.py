"""The plugin for Strands: a function that makes an ``Agent`` is an agent, and model calls have its name."""

from __future__ import annotations

from typing import Any

from art_core import hookimpl, when_imported
from art_core.types import RolloutAddress, RunAgent
from art_http.frameworks import is_a, name_while, refuse_shared


@hookimpl
def adapt_agent(agent: object, shared: bool) -> RunAgent | None:
    """Run an ``Agent``, a ``Graph`` or a ``Swarm`` with a task as its prompt; the output is the text of its result."""
    if not is_a(agent, "strands.Agent", "strands.multiagent.graph.Graph", "strands.multiagent.Swarm"):
        return None
    if shared:
        refuse_shared(agent)

    async def run(task_input: Any, address: RolloutAddress) -> str:
        return str(await agent.invoke_async(task_input)).strip()

    return run


@hookimpl
def redirect_clients() -> None:
    """Name the agent that is calling."""
    when_imported("strands.agent.agent", _name_agents)


def _name_agents(module: Any) -> None:
    name_while(module.Agent, "stream_async", lambda agent: agent.name)
