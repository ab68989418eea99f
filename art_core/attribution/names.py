"""Which node or agent is calling, on which thread of its framework? Asked of the plugins; knows nothing about rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import NamedTuple
from urllib.parse import quote

from art_core.types import within

Source = Callable[[], str | None]


class Caller(NamedTuple):
    """Who is calling."""

    agents: Mapping[str, str] = {}
    """Source, by its module and name -> the node or agent that it names."""
    thread: str | None = None


NOBODY = Caller()
starter: ContextVar[Caller] = ContextVar("art_starter", default=NOBODY)
"""Who started this thread or process, or gave it its work."""


def caller() -> Caller:
    """Return who is calling; what a source does not know here is what it knew where this work was started."""
    started = starter.get()
    agents = {_title(source): name for source in _sources if (name := source())}
    thread = next((name for source in _thread_sources if (name := source())), None)
    return Caller({**started.agents, **agents}, thread or started.thread)


def name_agents(source: Source) -> None:
    """Ask ``source`` at every redirected call for the node or agent that is calling; it returns None where it knows none.

    For plugins of frameworks, from ``redirect_clients``. ``source`` is a function of a module; the same again is not added.
    Where several know a name, as for an agent of one framework in another's node, the names are joined by ``/`` in the
    order of the sources' modules and names, because none knows which of them is outermost: ``art_langgraph``'s node stands
    before ``art_openai``'s agent. A name that stands in the path already is not repeated.
    """
    if source not in _sources:
        _sources.append(source)


def agent_name() -> str | None:
    """Return the node or agent that is calling, as ``Call.agent`` has it; for plugins that redirect calls."""
    return _path(caller().agents)


def _path(agents: Mapping[str, str]) -> str | None:
    path = ""
    for _, name in sorted(agents.items()):
        if not path or within(name, [path]):
            path = name
        elif not within(path, [name]):
            path = f"{path}/{name}"
    return path or None


def name_threads(source: Source) -> None:
    """Ask ``source`` at every redirected call for the framework's conversation thread; None where it knows none.

    For plugins, as ``name_agents``, but the first source that knows is believed; LangGraph's ``thread_id`` is one.
    """
    if source not in _thread_sources:
        _thread_sources.append(source)


def caller_headers() -> dict[str, str]:
    """Return what a redirected call tells of its caller: ``x-art-agent`` and ``x-art-thread``, each where it is known.

    For plugins that redirect calls. Percent-encoded, because a header holds Latin-1 only.
    """
    here = caller()
    known = {"x-art-agent": _path(here.agents), "x-art-thread": here.thread}
    return {header: quote(name, safe=" /|:") for header, name in known.items() if name}


def _title(source: Source) -> str:
    return f"{source.__module__}.{getattr(source, '__qualname__', '')}"


_sources: list[Source] = []
_thread_sources: list[Source] = []
