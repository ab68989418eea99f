"""`art gateway`: any agent's calls, recorded at an address of their own. Knows nothing about training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_core import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Offer ``art gateway``."""
    from art_gateway.command import EXAMPLE, gateway

    app.command("gateway", epilog=EXAMPLE)(gateway)
