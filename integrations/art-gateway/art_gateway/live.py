"""The engine ``live``: requests go on to the provider that the agent sends them to, and are recorded as text on their way.

What the provider receives is the agent's own request: body, path, query and headers are unchanged, except for the headers of the
connection itself. What the agent receives is the provider's answer, byte for byte.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import orjson

from art_core.capture import UNREACHABLE, Exchange, Refused
from art_core.errors import ConfigError, UpstreamError
from art_core.plugin_api import API_KEY
from art_core.types import Call, EngineBase, JsonDict, Weights
from art_gateway.answers import Answer, read_answer

if TYPE_CHECKING:
    import aiohttp

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
OWN = "x-art-"
"""What the headers begin with that are for this server only."""
OF_CONNECTIONS = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade",
        "host", "content-length", "accept-encoding", "content-encoding",
    }
)  # fmt: skip
"""Headers that each connection sets for itself. Answers are not compressed on their way, so that they can be read."""
CONNECT_SECONDS = 10.0
Record = Callable[[Call], Awaitable[None]]


class LiveEngine(EngineBase):
    """Lets the agent's own providers answer."""

    def __init__(self, model_folder: str, config: TrainConfig) -> None:
        self._timeout = config.call_timeout
        self._client: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the connection pool."""
        import aiohttp

        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=self._timeout),
            trust_env=True,
        )

    async def stop(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    async def load(self, weights: Weights) -> None:
        """Raise ConfigError: nobody here has these models' weights."""
        raise ConfigError("the agent's own providers can't be trained; pass a model to train, such as model='tiny'")

    async def relay(self, exchange: Exchange, path: str, body: bytes, request_id: str, record: Record) -> None:
        """Send a request to where its header says, and its answer back; record it before the answer's end is sent."""
        call = _Relayed(exchange, path, body, request_id)
        try:
            await self._exchange(call, record)
        finally:
            if call.content and not call.recorded:
                await call.save(record, aborted=True)

    async def _exchange(self, call: _Relayed, record: Record) -> None:
        import aiohttp
        from yarl import URL as Address

        exchange = call.exchange
        try:
            async with self._client.post(  # type: ignore[union-attr]
                Address(call.url, encoded=True), data=call.body, headers=call.headers(), allow_redirects=False
            ) as response:
                head = [(k, v) for k, v in response.raw_headers if k.decode("latin-1").lower() not in OF_CONNECTIONS]
                await exchange.begin(response.status, head)
                streams = response.content_length is None
                async for part in response.content.iter_any():
                    call.content += part
                    exchange.event(part)
                    if streams:
                        await exchange.flush()
                refused = response.status >= 400
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise UpstreamError(
                f"the connection to {Address(call.url).host} failed ({reason})", status=502, code=UNREACHABLE
            ) from error
        if refused:
            call.content.clear()  # an error is not an answer
        else:
            await call.save(record)
        await exchange.flush(last=True)


def provider_of(path: str) -> str | None:
    """Return where a program's request goes by default; None if that isn't known."""
    for beginning, (variable, default, kept) in PROVIDERS.items():
        if path.startswith(beginning):
            return os.environ.get(variable, default).rstrip("/") + kept + path.removeprefix("/v1")
    return None


class _Relayed:
    """A request on its way, and as much of its answer as has arrived."""

    def __init__(self, exchange: Exchange, path: str, body: bytes, request_id: str) -> None:
        url = exchange.headers.get(URL) or provider_of(path)
        if url is None or API_KEY in exchange.headers.get("authorization", ""):
            raise Refused(
                "the agent called this address itself, which here only records what it sends to its own provider: measure "
                "this agent with a model, or let it use its own base URL and key",
                status=400,
                code="no_provider",
            )
        self.url, self.exchange, self.path, self.body = url, exchange, path, body
        self.content = bytearray()
        self.recorded = False
        self._request_id = request_id
        self._began = time.monotonic()

    def headers(self) -> dict[str, str]:
        """Return the agent's own headers."""
        kept = {k: v for k, v in self.exchange.headers.items() if k not in OF_CONNECTIONS and not k.startswith(OWN)}
        return {**kept, "accept-encoding": "identity"}

    async def save(self, record: Record, *, aborted: bool = False) -> None:
        """Record one call per choice."""
        self.recorded = True
        dialect, names = self.exchange.dialect, self.exchange.name
        if dialect.counts_tokens:
            return
        answer = read_answer(self.path, dialect, bytes(self.content))
        seconds = time.monotonic() - self._began
        for index, (message, finish) in enumerate(
            answer.choices or Answer([({"role": "assistant", "content": None}, "stop")]).choices
        ):
            usage = {**(answer.usage if index == 0 else {}), "seconds": seconds}
            await record(
                Call(
                    prompt_ids=(), sampled_ids=(), logprobs=(), policy_version=-1, agent=names("x-art-agent"),
                    thread=names("x-art-thread"), request_id=self._request_id, choice=index,
                    finish_reason="aborted" if aborted else finish, request=self._request(), response=message, usage=usage,
                )
            )  # fmt: skip

    def _request(self) -> JsonDict:
        """Return the request as chat messages or, if its dialect can't be translated, as it is."""
        body: JsonDict = {}
        with suppress(ValueError):
            body = orjson.loads(self.body)
        try:
            return self.exchange.dialect.to_chat(body)
        except UpstreamError:
            return body
