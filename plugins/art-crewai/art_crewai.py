"""The plugin for CrewAI: a crew, an agent or a function that makes a flow is an agent; model calls have the agent's role."""

from __future__ import annotations

from typing import Any

from art_core import hookimpl, when_imported
from art_core.errors import AgentError
from art_core.types import RolloutAddress, RunAgent
from art_http.frameworks import is_a, name_while, refuse_shared


@hookimpl
def adapt_agent(agent: object, shared: bool) -> RunAgent | None:
    """Run a crew or a flow with a task as its inputs, an agent with it as its request; the output is the raw one."""
    if is_a(agent, "crewai.Agent"):
        return _agent(agent, shared)
    if is_a(agent, "crewai.Crew"):
        return _crew(agent, shared)
    if not is_a(agent, "crewai.Flow"):
        return None
    if shared:
        refuse_shared(agent)

    async def run(task_input: Any, address: RolloutAddress) -> Any:
        return await agent.kickoff_async(inputs=_inputs(task_input))

    return run


def _agent(agent: Any, shared: bool) -> RunAgent:
    if shared:
        _copy(agent)  # so that an error is raised before the first rollout

    async def run(task_input: Any, address: RolloutAddress) -> str:
        return (await (_equipped(_copy(agent), agent) if shared else agent).akickoff(task_input)).raw

    return run


def _crew(crew: Any, shared: bool) -> RunAgent:
    if shared:
        _copy(crew)  # so that an error is raised before the first rollout

    async def run(task_input: Any, address: RolloutAddress) -> str:
        running = _equipped_crew(crew) if shared else crew
        # ``akickoff`` would plan on the event loop, which CrewAI refuses.
        kickoff = running.kickoff_async if running.planning else running.akickoff
        output = await kickoff(inputs=_inputs(task_input))
        if running.stream:
            async for _ in output:
                pass
            output = output.result
        return output.raw

    return run


def _copy(original: Any) -> Any:
    """Return a copy, because a run changes a crew: it fills the inputs in and keeps the outputs. Raises AgentError."""
    try:
        return original.copy()
    except (LookupError, TypeError, ValueError) as error:
        kind = type(original).__name__
        why = " ".join(str(error).split())
        raise AgentError(
            f"this {kind} can't be copied for each rollout ({why:.200}); pass a function without parameters that makes one: "
            f"def agent(): return {kind}(...)"
        ) from error


def _equipped_crew(crew: Any) -> Any:
    copied = _copy(crew)
    for agent, original in zip(copied.agents, crew.agents, strict=True):
        _equipped(agent, original)
    return copied


def _equipped(copied: Any, agent: Any) -> Any:
    """Return a copied agent with what CrewAI's copy is without; a run adds their tools to the agent's own."""
    copied.apps, copied.mcps, copied.memory = agent.apps, agent.mcps, agent.memory
    return copied


def _inputs(task_input: Any) -> dict[str, Any]:
    return task_input if isinstance(task_input, dict) else {"task": task_input}


@hookimpl
def redirect_clients() -> None:
    """Name the agent that is calling."""
    when_imported("crewai.agent.core", _name_agents)


def _name_agents(module: Any) -> None:
    for method in ("execute_task", "aexecute_task", "kickoff", "kickoff_async"):
        name_while(module.Agent, method, lambda agent: agent.role.strip())
