"""Server, workers and dashboard: the policy and its trainer in one place, agents on any machine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from art_core import hookimpl

if TYPE_CHECKING:
    import typer

    from art_server.client import TrainingClient
    from art_server.remote import connect
    from art_server.roster import TrainingServer

__all__ = ["TrainingClient", "TrainingServer", "connect"]

_MODULES = {"TrainingClient": "client", "TrainingServer": "roster", "connect": "remote"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'art_server' has no attribute {name!r}")
    return getattr(import_module(f"art_server.{_MODULES[name]}"), name)


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``art serve``, ``art worker`` and ``art view``."""
    from art_server import command, view

    app.command("serve", epilog=command.SERVE)(command.serve)
    app.command("worker", epilog=command.WORKER)(command.worker)
    app.command("view", epilog=view.EXAMPLE)(view.view)
