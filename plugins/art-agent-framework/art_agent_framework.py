"""The plugin for Microsoft's Agent Framework: an agent or a workflow is an agent, and model calls have the agent's name."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from art_core import hookimpl, name_agents, when_imported
from art_core.types import RolloutAddress, RunAgent
from art_http.frameworks import calls_named, is_a, refuse_shared, running_agent

WORKFLOWS = ("agent_framework.Workflow", "agent_framework.FunctionalWorkflow")
WORKFLOW_AGENTS = ("agent_framework.WorkflowAgent", "agent_framework.FunctionalWorkflowAgent")


@hookimpl
def adapt_agent(agent: object, shared: bool) -> RunAgent | None:
    """Run an agent or a workflow with a task; the output is the text of its response, or a workflow's last output."""
    if not is_a(agent, "agent_framework.BaseAgent", *WORKFLOWS):
        return None
    if shared and is_a(agent, *WORKFLOWS, *WORKFLOW_AGENTS):
        refuse_shared(agent)

    async def run(task_input: Any, address: RolloutAddress) -> Any:
        result = await agent.run(task_input)
        if is_a(agent, *WORKFLOWS):
            outputs = result.get_outputs()
            result = outputs[-1] if outputs else None
        return result.text if is_a(result, "agent_framework.AgentResponse") else result

    return run


@hookimpl
def redirect_clients() -> None:
    """Name the agent that is calling."""
    name_agents(running_agent)
    when_imported("agent_framework._agents", _name_agents)


@functools.cache
def _name_agents(module: Any) -> None:
    run = module.RawAgent.run

    @functools.wraps(run)
    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Returns before the run begins.
        started, name = run(self, *args, **kwargs), functools.partial(calls_named, self.name or type(self).__name__)
        return started.with_pull_context_manager(name) if kwargs.get("stream") else _finished(started, name)

    module.RawAgent.run = named


async def _finished(started: Awaitable[Any], name: Callable[[], contextlib.AbstractContextManager[None]]) -> Any:
    with name():
        return await started
