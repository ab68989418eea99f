"""The engine ``live``: the agent's own providers answer, and their calls are recorded as text on their way."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from art_core.capture import Exchange, Refused
from art_core.errors import ConfigError, UpstreamError
from art_core.plugin_api import API_KEY
from art_core.types import EngineBase, JsonDict, Weights
from art_gateway.relay import Record, Relay, Relayed

if TYPE_CHECKING:
    from art_core import TrainConfig

URL = "x-art-url"
"""The header with a request's own address."""
PROVIDERS = {
    "/v1/messages": ("ANTHROPIC_BASE_URL", "https://api.anthropic.com", "/v1"),
    "/v1": ("OPENAI_BASE_URL", "https://api.openai.com/v1", ""),
}
"""Beginning of a path -> the variable with the provider's address, its default, and what of the path follows it.

For programs that the agent starts: they have this address instead of their provider's, which only this process still knows.
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

    async def relay(self, exchange: Exchange, path: str, body: bytes, request_id: str, record: Record) -> None:
        """Send a request to where its header says, and its answer back."""
        url = exchange.headers.get(URL) or provider_of(path)
        if url is None or API_KEY in exchange.headers.get("authorization", ""):
            raise Refused(
                "the agent called this address itself, which here only records what it sends to its own provider: measure "
                "this agent with a model, or let it use its own base URL and key",
                status=400,
                code="no_provider",
            )
        await self._relay.relay(Relayed(exchange, path, body, request_id), url, record)


def provider_of(path: str) -> str | None:
    """Return where a program's request goes by default; None if that isn't known."""
    for beginning, (variable, default, kept) in PROVIDERS.items():
        if path.startswith(beginning):
            return os.environ.get(variable, default).rstrip("/") + kept + path.removeprefix("/v1")
    return None
