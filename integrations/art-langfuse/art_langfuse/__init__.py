"""Langfuse and OpenTelemetry: exports rollouts as traces, and imports traces as rollouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_core import hookimpl
from art_core.plugin_api import Register
from art_langfuse.classic import ARTLangfuseTracker
from art_langfuse.tracker import LangfuseTracker, OtelTracker

if TYPE_CHECKING:
    import typer

__all__ = ["ARTLangfuseTracker", "LangfuseTracker", "OtelTracker"]


@hookimpl
def register_trackers(register: Register) -> None:
    """Register ``trackers=["langfuse"]`` and ``trackers=["otel"]``."""
    register("langfuse", LangfuseTracker, check=LangfuseTracker.check)
    register("otel", OtelTracker, check=OtelTracker.check)


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``art import langfuse``."""
    from art_langfuse.command import add_to

    add_to(app)
