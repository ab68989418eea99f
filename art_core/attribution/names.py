"""Which node or agent is calling, and in which conversation thread? Framework plugins register functions that answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from urllib.parse import quote

from art_core.types import within

Source = Callable[[], str | None]
_agent_sources: list[Source] = []
_thread_sources: list[Source] = []
starter_agents: ContextVar[Mapping[str, str] | None] = ContextVar("art_starter_agents", default=None)
"""``calling_agents()`` where this thread or process was started, or its work submitted."""
starter_thread: ContextVar[str | None] = ContextVar("art_starter_thread", default=None)
on_redirect: ContextVar[tuple[Callable[[], object], ...]] = ContextVar("art_on_redirect", default=())
"""What is called at every redirected call in this context."""


def name_agents(source: Source) -> None:
    """Ask ``source`` at every redirected call for the node or agent that is calling; it returns None if it knows none.

    For plugins of frameworks, from ``redirect_clients``. ``source`` is a module-level function; it is added once. If several
    sources name someone, the names are joined by ``/`` in alphabetical order of the sources' modules and names, because no
    source knows which is outermost. Each name appears once on the path.
    """
    if source not in _agent_sources:
        _agent_sources.append(source)


def name_threads(source: Source) -> None:
    """Ask ``source`` at every redirected call for the framework's conversation thread, such as LangGraph's ``thread_id``.

    As ``name_agents``, but the first source that returns a name decides.
    """
    if source not in _thread_sources:
        _thread_sources.append(source)


def calling_agents() -> dict[str, str]:
    """Return what each source names: here, or else where this work was started. Keys are the sources' modules and names."""
    here = {
        f"{source.__module__}.{getattr(source, '__qualname__', '')}": name
        for source in _agent_sources
        if (name := source())
    }
    return {**(starter_agents.get() or {}), **here}


def calling_thread() -> str | None:
    """Return the conversation thread here, or else where this work was started."""
    return next((name for source in _thread_sources if (name := source())), starter_thread.get())


def agent_name() -> str | None:
    """Return the node or agent that is calling, as in ``Call.agent``; for plugins that redirect calls."""
    path = ""
    for _, name in sorted(calling_agents().items()):
        if not path or within(name, [path]):
            path = name
        elif not within(path, [name]):
            path = f"{path}/{name}"
    return path or None


def caller_headers() -> dict[str, str]:
    """Return the headers of a redirected call that name its caller: ``x-art-agent`` and ``x-art-thread``, if known.

    For plugins that redirect calls, once per call. The names are percent-encoded, because headers hold only Latin-1.
    """
    for notify in on_redirect.get():
        notify()
    names = {"x-art-agent": agent_name(), "x-art-thread": calling_thread()}
    return {header: quote(name, safe=" /|:") for header, name in names.items() if name}
