"""Runs compiled LangGraph graphs, and names the node behind every call."""

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
"""A function of an interrupt's value, sync or async; ``interrupt(...)`` returns its result in the node."""


@hookimpl(tryfirst=True)  # a compiled graph is also a runnable, which art-langchain would adapt
def adapt_agent(agent: object) -> RunAgent | None:
    """Run a compiled graph; None for anything else."""
    # If LangGraph has not been imported, this can't be one of its graphs.
    if "langgraph.pregel" not in sys.modules:
        return None
    if not _is_graph(agent):
        return None

    async def run(input: Any, address: RolloutAddress) -> Any:
        return await _invoked(agent, _state(agent, input), _thread(address), _default_context(agent))

    return run


def answering(graph: Pregel, answer: Answer, *, context: Any = None) -> RunAgent:
    """Return an agent that runs ``graph`` to its end and answers every interrupt, all in one trajectory.

    ``answer`` receives the value of each ``interrupt(...)`` and returns what to resume with; it may be async. Simultaneous
    interrupts are answered one after another and resumed together. Breakpoints (``interrupt_before``) are resumed without an
    answer. ``context`` is passed to the graph unchanged; None: its ``context_schema`` with the defaults. A graph with interrupts
    needs a checkpointer; without one, LangGraph raises RuntimeError.
    """
    from langgraph.types import Command

    if not _is_graph(graph):
        raise AgentError(f"answering() needs a compiled LangGraph graph, got {graph!r:.100}")
    if not callable(answer):
        raise AgentError(f"answering() needs a function of the interrupt's value, got {answer!r:.100}")

    async def run(input: Any, address: RolloutAddress) -> Any:
        config, next_input = _thread(address), _state(graph, input)
        given = _default_context(graph) if context is None else context
        while True:
            output = await _invoked(graph, next_input, config, given)
            pending = output.get("__interrupt__") if isinstance(output, dict) else None
            if pending:
                answers = {interrupt.id: await _answered(answer, interrupt.value) for interrupt in pending}
                next_input = Command(resume=answers)
            elif await _at_breakpoint(graph, config):
                next_input = None
            else:
                return output

    return run


def _is_graph(agent: object) -> bool:
    """Return whether it is a compiled graph. Raises AgentError for a graph that is not compiled."""
    from langgraph.graph import StateGraph
    from langgraph.pregel import Pregel

    if isinstance(agent, StateGraph):
        raise AgentError("this StateGraph is not compiled: pass graph.compile()")
    return isinstance(agent, Pregel)


async def _invoked(graph: Pregel, input: Any, config: dict[str, Any], context: Any) -> Any:
    try:
        return await graph.ainvoke(input, config, context=context)
    except NotImplementedError as error:
        error.add_note(
            "The graph was run with ainvoke. If a part of it works only synchronously, pass a function that invokes it: "
            'def agent(task, address): return graph.invoke({"messages": [("user", task)]}, {"configurable": {"thread_id": '
            "address.rollout_id}}) (with task itself first, if it is the graph's input)"
        )
        raise


async def _answered(answer: Answer, value: Any) -> Any:
    result = answer(value)
    return await result if inspect.isawaitable(result) else result


async def _at_breakpoint(graph: Pregel, config: dict[str, Any]) -> bool:
    if not (graph.interrupt_before_nodes or graph.interrupt_after_nodes):
        return False
    return bool((await graph.aget_state(config)).next)


@hookimpl
def redirect_clients() -> None:
    """Name the node and thread behind each call, and refuse graphs that would answer from a cache."""
    name_agents(node)
    name_threads(thread)
    _guard()


@functools.cache
def _guard() -> None:
    when_imported("langgraph.pregel", lambda module: _guard_graphs(module.Pregel))


def _guard_graphs(pregel: type[Pregel]) -> None:
    # All other ways to run a graph use these two.
    for name in ("stream", "astream"):
        setattr(pregel, name, _guarded(getattr(pregel, name)))


def _guarded(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def guarded(self: Pregel, *args: Any, **kwargs: Any) -> Any:
        if self.cache is not None and destination(None) is not None:
            raise CaptureError(
                f"the graph {self.name!r} was run inside a rollout with a node cache: cached nodes make no model calls, so there "
                "is nothing to learn. Compile the graph without cache= for training"
            )
        return run(self, *args, **kwargs)

    return guarded


def node() -> str | None:
    """Return the path of the running node, such as ``researcher/model`` in a sub-graph; None outside a graph.

    An agent that isn't a node itself, because a tool runs it, is named before its node: ``tools/researcher/model``.
    """
    metadata = _config().get("metadata", {})
    namespace = metadata.get("langgraph_checkpoint_ns")
    if not namespace:
        return None
    # In "researcher:ID|1|model:ID", the bare number counts a node's runs of one sub-graph.
    steps = [step.partition(":")[0] for step in namespace.split("|")]
    *outer, last = [step for step in steps if not step.isdecimal()]
    agent = metadata.get("lc_agent_name")
    named = [agent] if agent and outer and agent not in outer else []
    return "/".join([*outer, *named, last])


def thread() -> str | None:
    """Return the running graph's ``thread_id``; None outside a graph, and if it has none."""
    thread_id = _config().get("configurable", {}).get("thread_id")
    return None if thread_id is None else str(thread_id)


def _config() -> dict[str, Any]:
    """Return the running graph's configuration; empty outside a graph."""
    configs = sys.modules.get("langchain_core.runnables.config")  # imported if a graph is running
    return (configs.var_child_runnable_config.get() if configs else None) or {}


def _thread(address: RolloutAddress) -> dict[str, Any]:
    # With a checkpointer, rollouts on the same thread would continue each other.
    return {"configurable": {"thread_id": address.rollout_id}}


def _default_context(graph: Pregel) -> Any:
    """Return the graph's context with its defaults, as LangGraph's own server passes it; None if it has none."""
    if graph.context_schema is None:
        return None
    try:
        return graph.context_schema()
    except (TypeError, ValueError):  # a field without a default; pydantic's ValidationError is a ValueError
        return None


def _state(graph: Pregel, input: Any) -> Any:
    if isinstance(input, str) and "messages" in graph.channels:
        return {"messages": [{"role": "user", "content": input}]}
    return input
