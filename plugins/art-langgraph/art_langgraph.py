"""Runs compiled LangGraph graphs and names the node behind every call. Knows nothing about how calls are captured."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from art_core import hookimpl
from art_core.attribution import name_agents
from art_core.errors import AgentError

if TYPE_CHECKING:
    from langgraph.pregel import Pregel

    from art_core.types import RolloutAddress, RunAgent


@hookimpl(tryfirst=True)  # a compiled graph is also a runnable, which art-langchain would take
def adapt_agent(agent: object) -> RunAgent | None:
    """Run a compiled graph; None for anything else."""
    # An object of LangGraph's exists only where its module was imported.
    if "langgraph.pregel" not in sys.modules:
        return None
    from langgraph.graph import StateGraph
    from langgraph.pregel import Pregel

    if isinstance(agent, StateGraph):
        raise AgentError("this StateGraph is not compiled: pass graph.compile()")
    if not isinstance(agent, Pregel):
        return None

    async def run(input: Any, address: RolloutAddress) -> Any:
        # A thread of its own: with a checkpointer, runs on one thread would continue each other.
        config = {"configurable": {"thread_id": address.rollout_id}}
        return await agent.ainvoke(_state(agent, input), config)

    return run


@hookimpl
def redirect_clients() -> None:
    """Tell the plugins that redirect calls which node is calling."""
    name_agents(node)


def node() -> str | None:
    """Return the node that is running, behind the nodes whose sub-graphs it stands in; None outside a graph."""
    from langchain_core.runnables.config import var_child_runnable_config

    config = var_child_runnable_config.get()
    namespace = (config or {}).get("metadata", {}).get("langgraph_checkpoint_ns")
    if not namespace:
        return None
    # "researcher:ID|1|model:ID": a bare number counts the runs of one sub-graph within a node.
    steps = (step.partition(":")[0] for step in namespace.split("|"))
    return "/".join(step for step in steps if not step.isdecimal())


def _state(graph: Pregel, input: Any) -> Any:
    if isinstance(input, str) and "messages" in graph.channels:
        return {"messages": [{"role": "user", "content": input}]}
    return input
