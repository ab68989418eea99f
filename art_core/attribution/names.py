"""Which node or agent is calling, on which thread of its framework? Asked of the plugins; knows nothing about rollouts."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from urllib.parse import quote

Source = Callable[[], str | None]

starter: ContextVar[str | None] = ContextVar("art_starter", default=None)
"""The node or agent that started this thread or process, or gave it its work."""


def name_agents(source: Source) -> None:
    """Ask ``source`` at every redirected call for the node or agent that is calling; it returns None where it knows none.

    For plugins of frameworks, from ``redirect_clients``. The same source again is not added.
    """
    if source not in _sources:
        _sources.append(source)


def agent_name() -> str | None:
    """Return the node or agent that is calling, from the first source that knows; for plugins that redirect calls."""
    return next((name for source in _sources if (name := source())), None) or starter.get()


def name_threads(source: Source) -> None:
    """Ask ``source`` at every redirected call for the framework's conversation thread; None where it knows none.

    For plugins, as ``name_agents``; LangGraph's ``thread_id`` is one.
    """
    if source not in _thread_sources:
        _thread_sources.append(source)


def caller_headers() -> dict[str, str]:
    """Return what a redirected call tells of its caller: ``x-art-agent`` and ``x-art-thread``, each where it is known.

    For plugins that redirect calls. Percent-encoded, because a header holds Latin-1 only.
    """
    thread = next((name for source in _thread_sources if (name := source())), None)
    known = {"x-art-agent": agent_name(), "x-art-thread": thread}
    return {header: quote(name, safe=" /|:") for header, name in known.items() if name}


_sources: list[Source] = []
_thread_sources: list[Source] = []
