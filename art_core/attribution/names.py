"""Which node or agent is calling? Asked of the frameworks' plugins; knows nothing about rollouts."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

starter: ContextVar[str | None] = ContextVar("art_starter", default=None)
"""The node or agent that started this thread or process, or gave it its work."""


def name_agents(source: Callable[[], str | None]) -> None:
    """Ask ``source`` at every redirected call for the node or agent that is calling; it returns None where it knows none.

    For plugins of frameworks, from ``redirect_clients``. The same source again is not added.
    """
    if source not in _sources:
        _sources.append(source)


def agent_name() -> str | None:
    """Return the node or agent that is calling, from the first source that knows; for plugins that redirect calls."""
    return next((name for source in _sources if (name := source())), None) or starter.get()


_sources: list[Callable[[], str | None]] = []
