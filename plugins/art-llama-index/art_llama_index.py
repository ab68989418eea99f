"""The plugin for LlamaIndex: a workflow, such as an agent, is an agent, and model calls have the agent's name."""

from __future__ import annotations

from typing import Any

from art_core import hookimpl, when_imported
from art_core.types import RolloutAddress, RunAgent
from art_http.frameworks import is_a, name_while

AGENTS = {"function_agent": "FunctionAgent", "react_agent": "ReActAgent", "codeact_agent": "CodeActAgent"}
"""Module -> class with a ``take_step`` of its own."""


@hookimpl
def adapt_agent(agent: object) -> RunAgent | None:
    """Run an agent or another workflow with a task as ``user_msg``; an agent's output is its answer's text."""
    if not is_a(agent, "workflows.Workflow"):
        return None

    async def run(task_input: Any, address: RolloutAddress) -> Any:
        arguments = task_input if isinstance(task_input, dict) else {"user_msg": task_input}
        result = await agent.run(**arguments)
        return str(result) if is_a(result, "llama_index.core.agent.workflow.AgentOutput") else result

    return run


@hookimpl
def redirect_clients() -> None:
    """Name the agent that is calling."""
    for module in AGENTS:
        when_imported(f"llama_index.core.agent.workflow.{module}", _name_agents)


def _name_agents(module: Any) -> None:
    kind = getattr(module, AGENTS[module.__name__.rpartition(".")[2]])
    name_while(kind, "take_step", lambda agent: agent.name)
