"""`art gateway`: records the calls of any agent, in any of the common wire formats, at one base URL per rollout."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from art_core import hookimpl
from art_core.errors import ConfigError
from art_core.plugin_api import Register
from art_gateway.dialects import dialects

if TYPE_CHECKING:
    import typer

    from art_core import TrainConfig
    from art_core.types import Engine

__all__ = ["dialects"]


@hookimpl
def register_commands(app: typer.Typer) -> None:
    """Add ``art gateway``, ``art route`` and ``art watch``."""
    from art_gateway.canary.command import EXAMPLE as ROUTE_EXAMPLE
    from art_gateway.canary.command import route
    from art_gateway.command import EXAMPLE, gateway
    from art_gateway.watch import EXAMPLE as WATCH_EXAMPLE
    from art_gateway.watch import watch

    app.command("gateway", epilog=EXAMPLE)(gateway)
    app.command("route", epilog=ROUTE_EXAMPLE)(route)
    app.command("watch", epilog=WATCH_EXAMPLE)(watch)


@hookimpl
def register_dialects(register: Register) -> None:
    """Register Responses, Anthropic Messages and completions."""
    for path, dialect in dialects().items():
        register(path, dialect)


@hookimpl
def register_engines(register: Register) -> None:
    """Register ``live``, with which the agent's own providers answer."""
    register("live", live_engine, check=check_live)


def live_engine(model_folder: str, config: TrainConfig) -> Engine:
    """Return the engine that relays and records."""
    from art_gateway.live import LiveEngine

    return LiveEngine(model_folder, config)


def check_live() -> None:
    """Raise ConfigError if nothing would send the agent's calls to the engine: they would leave unrecorded."""
    if importlib.util.find_spec("art_http") is None:
        raise ConfigError(
            "model='live' needs art-http, through which the agent's calls are recorded; in the checkout of art: pip install "
            "-e plugins/art-http"
        )
