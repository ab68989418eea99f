"""Passes requests on to a provider, its answers back, and records both as text on their way.

What the provider receives is the client's own request: body, query and headers are unchanged, except for the headers of the
connection itself. What the client receives is the provider's answer, byte for byte.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import orjson

from art_core.capture import UNREACHABLE, Exchange
from art_core.errors import UpstreamError
from art_core.types import Call, JsonDict
from art_gateway.answers import Answer, read_answer

if TYPE_CHECKING:
    import aiohttp

OWN = "x-art-"
"""What the headers begin with that are for this server only."""
OF_CONNECTIONS = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade",
        "host", "content-length", "accept-encoding", "content-encoding",
    }
)  # fmt: skip
"""Headers that each connection sets for itself. Answers are not compressed on their way, so that they can be read."""
KEYS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key"})
"""Headers with a client's key."""
CONNECT_SECONDS = 10.0
EMPTY = Answer([({"role": "assistant", "content": None}, "stop")])
"""An answer that can't be read."""
Record = Callable[[Call], Awaitable[None]]


class Relay:
    """Connections to providers, in one event loop. ``timeout``: seconds between two parts of an answer; None: no limit."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
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

    async def relay(self, call: Relayed, url: str, record: Record, key: Mapping[str, str] | None = None) -> None:
        """Send a request to ``url``, and its answer back; record it before the answer's end is sent.

        ``key``: a header that replaces the client's keys. Raises UpstreamError if the connection fails.
        """
        try:
            await self._exchange(call, url, record, key or {})
        finally:
            if call.content and not call.recorded:
                await call.save(record, aborted=True)

    async def _exchange(self, call: Relayed, url: str, record: Record, key: Mapping[str, str]) -> None:
        import aiohttp
        from yarl import URL

        exchange, to = call.exchange, URL(url, encoded=True)
        dropped = OF_CONNECTIONS | KEYS if key else OF_CONNECTIONS
        headers = {
            name: it for name, it in exchange.headers.items() if name not in dropped and not name.startswith(OWN)
        }
        headers |= {**key, "accept-encoding": "identity"}
        try:
            async with self._client.post(  # type: ignore[union-attr]
                to, data=call.body, headers=headers, allow_redirects=False
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
                f"the connection to {to.host} failed ({reason})", status=502, code=UNREACHABLE
            ) from error
        if refused:
            call.content.clear()  # an error is not an answer
        else:
            await call.save(record)
        await exchange.flush(last=True)


class Relayed:
    """A request on its way, and as much of its answer as has arrived. ``path`` is its dialect's."""

    def __init__(self, exchange: Exchange, path: str, body: bytes, request_id: str) -> None:
        self.exchange, self.path, self.body = exchange, path, body
        self.content = bytearray()
        self.recorded = False
        self._request_id = request_id
        self._began = time.monotonic()

    async def save(self, record: Record, *, aborted: bool = False) -> None:
        """Record one call per choice; the first has the usage of all."""
        self.recorded = True
        dialect, name = self.exchange.dialect, self.exchange.name
        if dialect.counts_tokens:
            return
        answer = read_answer(self.path, dialect, bytes(self.content))
        seconds = time.monotonic() - self._began
        for index, (message, finish) in enumerate(answer.choices or EMPTY.choices):
            await record(
                Call(
                    prompt_ids=(), sampled_ids=(), logprobs=(), policy_version=-1, agent=name("x-art-agent"),
                    thread=name("x-art-thread"), request_id=self._request_id, choice=index,
                    finish_reason="aborted" if aborted else finish, request=self.request(), response=message,
                    usage={**(answer.usage if index == 0 else {}), "seconds": seconds},
                )
            )  # fmt: skip

    def request(self) -> JsonDict:
        """Return the request as chat messages or, if its dialect can't be translated, as it is."""
        body: JsonDict = {}
        with suppress(ValueError):
            body = orjson.loads(self.body)
        try:
            return self.exchange.dialect.to_chat(body)
        except UpstreamError:
            return body
