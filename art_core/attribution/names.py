"""Which node or agent is calling, and in which conversation thread? Framework plugins register functions that answer."""

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
    """Module and name of a source -> the node or agent that it names."""
    thread: str | None = None


starter: ContextVar[Caller] = ContextVar("art_starter", default=Caller())
"""Who started this thread or process, or submitted its work."""


def caller() -> Caller:
    """Return who is calling. Sources that name nobody here keep the names that they had for the starter of this work."""
    started = starter.get()
    agents = {f"{it.__module__}.{it.__qualname__}": name for it in _agent_sources if (name := it())}
    thread = next((name for source in _thread_sources if (name := source())), started.thread)
    return Caller({**started.agents, **agents}, thread)


def name_agents(source: Source) -> None:
    """Ask ``source`` at every redirected call for the node or agent that is calling; it returns None if it knows none.

    For plugins of frameworks, from ``redirect_clients``. ``source`` is a module-level function; it is added once. If several
    sources name someone, the names are joined by ``/`` in the order of the sources' modules and names, because none of them
    knows which is outermost: the node of ``art_langgraph`` comes before the agent of ``art_openai``. Each name is on the path
    once.
    """
    if source not in _agent_sources:
        _agent_sources.append(source)


def name_threads(source: Source) -> None:
    """Ask ``source`` at every redirected call for the framework's conversation thread, such as LangGraph's ``thread_id``.

    As ``name_agents``, but the first source that returns a name decides.
    """
    if source not in _thread_sources:
        _thread_sources.append(source)


def agent_name() -> str | None:
    """Return the node or agent that is calling, as in ``Call.agent``; for plugins that redirect calls."""
    path = ""
    for _, name in sorted(caller().agents.items()):
        if not path or within(name, [path]):
            path = name
        elif not within(path, [name]):
            path = f"{path}/{name}"
    return path or None


def caller_headers() -> dict[str, str]:
    """Return the headers of a redirected call that name its caller: ``x-art-agent`` and ``x-art-thread``, if known.

    For plugins that redirect calls. The names are percent-encoded, because headers hold only Latin-1.
    """
    names = {"x-art-agent": agent_name(), "x-art-thread": caller().thread}
    return {header: quote(name, safe=" /|:") for header, name in names.items() if name}


_agent_sources: list[Source] = []
_thread_sources: list[Source] = []
