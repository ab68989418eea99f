"""The plugin for Haystack: an ``Agent`` or a ``Pipeline`` is an agent, and model calls have the component's name."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from art_core import hookimpl, name_agents, when_imported
from art_core.types import RolloutAddress, RunAgent
from art_http.frameworks import calls_named, is_a, name_while, running_agent

PIPELINE = "haystack.Pipeline"


@hookimpl
def adapt_agent(agent: object) -> RunAgent | None:
    """Run a ``Pipeline`` with a task as its data, or an ``Agent`` with one as a message; the output is its last one's text."""
    if not is_a(agent, PIPELINE, "haystack.components.agents.Agent"):
        return None

    async def run(task_input: Any, address: RolloutAddress) -> Any:
        if is_a(agent, PIPELINE):
            return await agent.run_async(task_input)
        from haystack.dataclasses import ChatMessage

        messages = [ChatMessage.from_user(task_input)] if isinstance(task_input, str) else task_input
        arguments = messages if isinstance(messages, dict) else {"messages": messages}
        last = (await agent.run_async(**arguments))["last_message"]
        # An exit condition can end the agent with the result of a tool.
        return last.tool_call_result.result if last.tool_call_result else last.text

    return run


@hookimpl
def redirect_clients() -> None:
    """Name the component of a pipeline, or the agent that is another's tool, that is calling."""
    name_agents(running_agent)
    when_imported("haystack.core.pipeline.base", _name_components)
    when_imported("haystack.tools.agent_tool", _name_tools)


@functools.cache
def _name_components(module: Any) -> None:
    # Every way to run a component opens one.
    span = module.PipelineBase._create_component_span

    @contextlib.contextmanager
    def named(component_name: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with calls_named(component_name), span(component_name, *args, **kwargs) as opened:
            yield opened

    module.PipelineBase._create_component_span = staticmethod(named)


def _name_tools(module: Any) -> None:
    for method in ("invoke", "invoke_async"):
        name_while(module.AgentTool, method, lambda tool: tool.name)
