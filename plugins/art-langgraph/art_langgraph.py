"""Runs compiled LangGraph graphs and names the node behind every call. Knows nothing about how calls are captured."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from art_core import destination, hookimpl, name_agents, name_threads, when_imported
from art_core.errors import AgentError, CaptureError

if TYPE_CHECKING:
    from langgraph.pregel import Pregel

    from art_core.types import RolloutAddress, RunAgent

Answer = Callable[[Any], Any]
"""A function of an interrupt's value, sync or async; what it returns is what ``interrupt(...)`` returns in the node."""


@hookimpl(tryfirst=True)  # a compiled graph is also a runnable, which art-langchain would take
def adapt_agent(agent: object) -> RunAgent | None:
    """Run a compiled graph; None for anything else."""
    # An object of LangGraph's exists only where its module was imported.
    if "langgraph.pregel" not in sys.modules:
        return None
    if not _is_graph(agent):
        return None

    async def run(input: Any, address: RolloutAddress) -> Any:
        return await agent.ainvoke(_state(agent, input), _thread(address))

    return run


def answering(graph: Pregel, answer: Answer, *, context: Any = None) -> RunAgent:
    """Return an agent that runs ``graph`` to its end, answering every interrupt: one trajectory across all of them.

    ``answer`` is given the value of each ``interrupt(...)`` and returns what to resume with; it may be async. Interrupts
    that wait at the same time are answered one after another and resumed together. Breakpoints (``interrupt_before``) ask
    nothing and are passed. ``context`` is given to the graph as it is. A graph that interrupts needs a checkpointer:
    LangGraph's own RuntimeError says so.
    """
    from langgraph.types import Command

    if not _is_graph(graph):
        raise AgentError(f"answering() runs a compiled LangGraph graph, not {graph!r:.100}")
    if not callable(answer):
        raise AgentError(f"answering() takes a function of the interrupt's value, not {answer!r:.100}")

    async def run(input: Any, address: RolloutAddress) -> Any:
        config, next_input = _thread(address), _state(graph, input)
        while True:
            output = await graph.ainvoke(next_input, config, context=context)
            pending = output.get("__interrupt__") if isinstance(output, dict) else None
            if pending:
                next_input = Command(resume={asked.id: await _answered(answer, asked.value) for asked in pending})
            elif await _at_breakpoint(graph, config):
                next_input = None
            else:
                return output

    return run


def _is_graph(agent: object) -> bool:
    """Tell whether it is a compiled graph. Raises AgentError where it is one that is not compiled."""
    from langgraph.graph import StateGraph
    from langgraph.pregel import Pregel

    if isinstance(agent, StateGraph):
        raise AgentError("this StateGraph is not compiled: pass graph.compile()")
    return isinstance(agent, Pregel)


async def _answered(answer: Answer, value: Any) -> Any:
    said = answer(value)
    return await said if inspect.isawaitable(said) else said


async def _at_breakpoint(graph: Pregel, config: dict[str, Any]) -> bool:
    if not (graph.interrupt_before_nodes or graph.interrupt_after_nodes):
        return False
    return bool((await graph.aget_state(config)).next)


@hookimpl
def redirect_clients() -> None:
    """Tell the plugins that redirect calls which node is calling, and keep graphs from answering out of a cache."""
    name_agents(node)
    name_threads(thread)
    _guard()


@functools.cache
def _guard() -> None:
    when_imported("langgraph.pregel", lambda module: _guard_graphs(module.Pregel))


def _guard_graphs(pregel: type[Pregel]) -> None:
    # Every other way to run a graph is made of these two.
    for name in ("stream", "astream"):
        setattr(pregel, name, _guarded(getattr(pregel, name)))


def _guarded(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def guarded(self: Pregel, *args: Any, **kwargs: Any) -> Any:
        if self.cache is not None and destination(None) is not None:
            raise CaptureError(
                f"the graph {self.name!r} was run inside a rollout with a node cache: a node that is answered from it makes "
                "no model calls, so there is nothing to learn. Compile the graph without cache= while training"
            )
        return run(self, *args, **kwargs)

    return guarded


def node() -> str | None:
    """Return the node that is running, behind the nodes whose sub-graphs it stands in; None outside a graph."""
    namespace = _config().get("metadata", {}).get("langgraph_checkpoint_ns")
    if not namespace:
        return None
    # "researcher:ID|1|model:ID": a bare number counts the runs of one sub-graph within a node.
    steps = (step.partition(":")[0] for step in namespace.split("|"))
    return "/".join(step for step in steps if not step.isdecimal())


def thread() -> str | None:
    """Return the ``thread_id`` that the running graph was given; None outside a graph, and where it was given none."""
    thread_id = _config().get("configurable", {}).get("thread_id")
    return None if thread_id is None else str(thread_id)


def _config() -> dict[str, Any]:
    """Return the configuration of the running graph; empty outside one."""
    configs = sys.modules.get("langchain_core.runnables.config")  # a graph runs only where it was imported
    return (configs.var_child_runnable_config.get() if configs else None) or {}


def _thread(address: RolloutAddress) -> dict[str, Any]:
    # A thread of its own: with a checkpointer, runs on one thread would continue each other.
    return {"configurable": {"thread_id": address.rollout_id}}


def _state(graph: Pregel, input: Any) -> Any:
    if isinstance(input, str) and "messages" in graph.channels:
        return {"messages": [{"role": "user", "content": input}]}
    return input
