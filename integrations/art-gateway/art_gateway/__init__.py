"""`art gateway`: records the calls of any agent, in any of the common wire formats, at one base URL per rollout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from art_core import hookimpl
from art_core.plugin_api import Register
from art_gateway.dialects import dialects

if TYPE_CHECKING:
    import typer

__all__ = ["dialects"]


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``art gateway``."""
    from art_gateway.command import EXAMPLE, gateway

    app.command("gateway", epilog=EXAMPLE)(gateway)


@hookimpl
def register_dialects(register: Register) -> None:
    """Register Responses, Anthropic Messages and completions."""
    for path, dialect in dialects().items():
        register(path, dialect)
