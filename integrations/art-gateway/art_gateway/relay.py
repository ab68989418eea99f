"""Passes requests on to a provider, its answers back, and records both as text on their way.

The provider receives the client's own body, query and headers, the client the provider's status, headers and body. Headers of the
connection itself are left out, and answers are not compressed, so that they can be read.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.request import getproxies, proxy_bypass

from art_core.capture import TIMED_OUT, UNREACHABLE, Exchange, RelayedCall
from art_core.errors import UpstreamError
from art_core.types import Call, JsonDict
from art_gateway.answers import Choice, read_answer
from art_gateway.dialects.reading import read_leniently

if TYPE_CHECKING:
    import aiohttp
    from multidict import CIMultiDict

log = logging.getLogger("art_gateway")
OWN = "x-art-"
"""What the headers begin with that are for this server only."""
OF_CONNECTIONS = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade",
        "content-length",
    }
)  # fmt: skip
OF_REQUESTS = OF_CONNECTIONS | {"host", "accept-encoding"}
OF_ANSWERS = OF_CONNECTIONS | {"content-encoding", "date", "server"}
"""Headers that this end sets itself."""
KEYS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key"})
"""Headers with a client's key."""
NOT_ADDED = ("User-Agent", "Accept", "Content-Type")
CONNECT_SECONDS = 10.0
ENDS = re.compile(
    rb'^data: ?\[DONE\]|^event: ?message_stop|^event: ?response\.(completed|incomplete|failed)|"finishReason":|"done": ?true',
    re.MULTILINE,
)
"""What the last events of streams have (others may too). As soon as a client has read them, it may take the answer for whole."""
LOOKBACK = 64
"""Bytes before a part that an end may have begun in."""


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
            trust_env=False,  # which reads passwords from .netrc too
        )

    async def stop(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    async def relay(
        self, exchange: Exchange, call: RelayedCall, url: str, key: Mapping[str, str] | None = None
    ) -> None:
        """Send a request to ``url``, and its answer back; record it before the answer's end is sent.

        ``key``: a header that replaces the client's keys. Raises UpstreamError if the connection fails.
        """
        recording = _Recording(exchange, call)
        try:
            await self._exchange(exchange, recording, "POST", call.body, url, key or {})
        finally:
            await recording.save()

    async def pass_on(self, exchange: Exchange, body: bytes, url: str, key: Mapping[str, str] | None = None) -> None:
        """Do the same for a request that is not a model call, without recording it."""
        await self._exchange(exchange, None, exchange.method, body, url, key or {})

    async def _exchange(
        self,
        exchange: Exchange,
        recording: _Recording | None,
        method: str,
        body: bytes,
        url: str,
        key: Mapping[str, str],
    ) -> None:
        import aiohttp
        from yarl import URL

        try:
            to = URL(url, encoded=True).with_user(None)
            async with self._client.request(  # type: ignore[union-attr]
                method, to, data=body or None, headers=_headers(exchange, key), skip_auto_headers=NOT_ADDED,
                allow_redirects=False, proxy=_proxy(to),
            ) as response:  # fmt: skip
                await self._pass_back(exchange, recording, response)
        except TimeoutError as error:
            raise UpstreamError(
                f"the provider did not answer within {self._timeout:g} seconds", status=504, code=TIMED_OUT
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # Without the error's text, which may have a key of the address in it.
            message = f"the connection to the provider failed ({type(error).__name__})"
            raise UpstreamError(message, status=502, code=UNREACHABLE) from error

    async def _pass_back(self, exchange: Exchange, recording: _Recording | None, response: Any) -> None:
        head = [
            (name, value) for name, value in response.raw_headers if name.decode("latin-1").lower() not in OF_ANSWERS
        ]
        if recording is not None and not 200 <= response.status < 300:
            recording = None  # a refusal is not an answer
        if response.content_length is not None:
            parts = (
                await response.read()
            )  # before the answer begins, so that the client can still learn that it broke off
            if recording is not None:
                recording.add(parts)
                await recording.save(whole=True)
            await exchange.begin(response.status, head)
            exchange.event(parts)
            return await exchange.flush(last=True)
        await exchange.begin(response.status, head)
        async for part in response.content.iter_any():
            if recording is not None and recording.add(part):
                await recording.save()
            exchange.event(part)
            await exchange.flush()
        if recording is not None:
            await recording.save(whole=True)
        await exchange.flush(last=True)


class _Recording:
    """A request, as much of its answer as has arrived, and what is recorded of both, once."""

    def __init__(self, exchange: Exchange, call: RelayedCall) -> None:
        self._exchange, self._call = exchange, call
        self._content = bytearray()
        self._saved = False
        self._began = time.monotonic()

    def add(self, part: bytes) -> bool:
        """Add a part of the answer, and return whether its last event has arrived."""
        begin = max(0, len(self._content) - LOOKBACK)
        self._content += part
        self._call.note_progress()
        return (
            ENDS.search(self._content, begin) is not None and read_answer(self._call.path, bytes(self._content)).ended
        )

    async def save(self, *, whole: bool = False) -> None:
        """Record the answer, if any of it arrived and it isn't recorded yet. ``whole``: the body ended as it should."""
        if self._saved or not self._content:
            return
        self._saved = True
        dialect, call, name = self._exchange.dialect, self._call, self._exchange.name
        if dialect.counts_tokens:
            return
        answer = read_answer(call.path, bytes(self._content))
        read = bool(answer.choices)
        aborted = answer.failed or not (answer.ended if read else whole)
        request, seconds = self._request(), time.monotonic() - self._began
        temperature = request.get("temperature")
        choices = sorted(answer.choices.items()) or [(0, Choice())]
        await call.record(
            [
                Call(
                    prompt_ids=(), sampled_ids=(), logprobs=(), policy_version=-1,
                    agent=name("x-art-agent") or dialect.agent(self._exchange.headers), thread=name("x-art-thread"),
                    request_id=call.request_id, choice=index, finish_reason="aborted" if aborted else choice.finish,
                    temperature=float(temperature) if isinstance(temperature, int | float) else 1.0,
                    request=request, response=choice.message(),
                    usage={**(answer.usage if choice is choices[0][1] else {}), "seconds": seconds},
                )
                for index, choice in choices
            ]
        )  # fmt: skip

    def _request(self) -> JsonDict:
        """Return the request as chat messages or, if its dialect can't be translated, as it is.

        Messages that aren't chat messages are in ``unread_messages``, because readers of calls rely on the form of ``messages``.
        """
        body: Any = {}
        with suppress(ValueError):
            body = read_leniently(self._call.body)
        if not isinstance(body, dict):
            log.warning("call %s is recorded without its request, which isn't a JSON object", self._call.request_id)
            return {}
        if self._call.model is not None:
            body = {"model": self._call.model, **body}
        with suppress(UpstreamError):
            body = self._exchange.dialect.to_chat(body)
        if "messages" in body and not _are_messages(body["messages"]):
            body["unread_messages"] = body.pop("messages")
        return body


def _are_messages(messages: object) -> bool:
    return isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("tool_calls"), list | None) for message in messages
    )


def _headers(exchange: Exchange, key: Mapping[str, str]) -> CIMultiDict[str]:
    from multidict import CIMultiDict

    dropped = OF_REQUESTS | KEYS if key else OF_REQUESTS
    headers: CIMultiDict[str] = CIMultiDict()
    for raw_name, value in exchange.raw_headers:
        name = raw_name.decode("latin-1").lower()
        if name not in dropped and not name.startswith(OWN):
            headers.add(name, _as_text(value))
    headers.update({**key, "accept-encoding": "identity"})
    return headers


def _as_text(value: bytes) -> str:
    """Decode a header's value so that aiohttp, which encodes it as UTF-8, sends the same bytes if it can."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _proxy(url: Any) -> str | None:
    """Return the proxy that the environment names for an address."""
    return None if proxy_bypass(url.host or "") else getproxies().get(url.scheme)
