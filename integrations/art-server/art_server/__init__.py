"""Server, workers and dashboard: the policy and its trainer in one place, agents anywhere. Knows nothing about learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_core import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Offer ``art view``."""
    from art_server import view

    app.command("view", epilog=view.EXAMPLE)(view.view)
