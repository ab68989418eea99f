"""The engine ``live``: the agent's own providers answer, and their calls are recorded as text on their way."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from art_core.capture import Exchange, Refused, RelayedCall
from art_core.errors import ConfigError, UpstreamError
from art_core.plugin_api import API_KEY
from art_core.types import EngineBase, JsonDict, Weights
from art_gateway.relay import KEYS, Relay
from art_gateway.text import below_rollout

if TYPE_CHECKING:
    from art_core import TrainConfig

URL = "x-art-url"
"""The header with a request's own address."""
VARIABLES = {"/v1/messages": ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_URL"), "/v1": ("OPENAI_BASE_URL", "OPENAI_API_BASE")}
"""Beginning of a path -> the variables that may have the provider's address.

For programs that the agent starts: they have this address there instead, if they would have had that of this process.
"""


class LiveEngine(EngineBase):
    """Lets the agent's own providers answer."""

    def __init__(self, model_folder: str, config: TrainConfig) -> None:
        self._relay = Relay(config.call_timeout)

    async def start(self) -> None:
        """Open the connection pool."""
        await self._relay.start()

    async def stop(self) -> None:
        """Close the connections."""
        await self._relay.stop()

    async def load(self, weights: Weights) -> None:
        """Raise ConfigError: nobody here has these models' weights."""
        raise ConfigError("the agent's own providers can't be trained; pass a model to train, such as model='tiny'")

    async def chat(self, request: JsonDict) -> JsonDict:
        """Raise UpstreamError; ``relay`` answers."""
        raise UpstreamError("the live engine only relays", status=500)

    async def relay(self, exchange: Exchange, call: RelayedCall) -> None:  # type: ignore[override]
        """Send a request to where its header says, and its answer back."""
        url = exchange.headers.get(URL) or programs_url(exchange, call.path)
        if url is None or any(API_KEY in exchange.headers.get(header, "") for header in KEYS):
            raise Refused(
                "the agent called this address itself, but with model='live' it only passes on requests to the agent's own "
                "provider: let the agent use its own base URL and key, or evaluate it with a model",
                status=400,
                code="no_provider",
            )
        await self._relay.relay(exchange, call, url)


def programs_url(exchange: Exchange, path: str) -> str | None:
    """Return where a program would have sent a request to this address; None if its variables don't say it."""
    names = next((names for beginning, names in VARIABLES.items() if path.startswith(beginning)), ())
    base = next((os.environ[name] for name in names if os.environ.get(name)), None)
    if base is None:
        return None
    rest = below_rollout(exchange).removeprefix("/v1").removeprefix("/v1")
    return base.rstrip("/") + ("/v1" if path == "/v1/messages" else "") + rest
