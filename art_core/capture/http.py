"""One HTTP request and its answer, over raw ASGI."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import unquote

import orjson

from art_core.capture.dialect import CHAT_COMPLETIONS, Dialect
from art_core.capture.upstream import TIMED_OUT
from art_core.errors import StoreError, UpstreamError
from art_core.types import Call, JsonDict

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

BODY_SECONDS = 120.0
"""From a request's headers to the end of its body."""
RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504})
"""Statuses that OpenAI's clients retry by themselves, unless the answer says otherwise."""


class Refused(UpstreamError):
    """Refused by this server, not by the upstream. Clients are told not to retry, because it would be refused again."""


def error_line(error: Exception) -> str:
    """Return the error that answers a request, in one line of at most 500 characters."""
    status, code = getattr(error, "status", 500), getattr(error, "code", None)
    return " ".join(f"{status} {f'{code}: ' if code else ''}{error}".split())[:500]


class Exchange:
    """One request and its answer. Errors have the shape of ``dialect``."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.raw_headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.dialect: Dialect = CHAT_COMPLETIONS
        self.started = False
        self.finished = False
        """The whole answer was passed to the server."""
        self._scope = scope
        self._receive = receive
        self._send = send
        self._events: list[bytes] = []

    @cached_property
    def headers(self) -> dict[str, str]:
        """The request's headers, by lower-case name."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self._scope["headers"]}

    @cached_property
    def target(self) -> str:
        """The path as it was sent, percent-encoded, and the query."""
        query = self._scope.get("query_string", b"")
        return (self._scope.get("raw_path", b"") + (b"?" + query if query else b"")).decode("latin-1")

    def name(self, header: str) -> str | None:
        """Return a header that clients percent-encode, because headers are Latin-1. None if it is missing or empty."""
        return unquote(self.headers.get(header, "")) or None

    async def body(self, limit: int) -> bytes | None:
        """Return the whole body, or None if the client disconnected first.

        Raises Refused if the body has more than ``limit`` bytes (413) or takes longer than ``BODY_SECONDS`` (408).
        """
        parts: list[bytes] = []
        size, more = 0, True
        length = self.headers.get("content-length", "")
        fits = not (length.isdecimal() and int(length) > limit)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part, more = message.get("body", b""), message.get("more_body")
                    size += len(part)
                    # A body beyond the limit is read and dropped: a client that is still sending would miss the answer.
                    if fits and size <= limit:
                        parts.append(part)
                    else:
                        parts.clear()
        except TimeoutError as error:
            raise Refused(f"the body of a request must arrive within {BODY_SECONDS:g} seconds", status=408) from error
        if size > limit:
            raise Refused(f"the request body has {size} bytes; the limit is {limit}", status=413)
        return b"".join(parts)

    async def disconnected(self) -> None:
        """Return when the client has disconnected."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, body: JsonDict, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Send a whole JSON answer."""
        content = orjson.dumps(body)
        head = ((b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()), *headers)
        self.started = self.finished = True
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": content})

    def event(self, event: str | bytes) -> None:
        """Add an event of a stream; ``flush`` sends it."""
        self._events.append(event.encode() if isinstance(event, str) else event)

    async def begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Start an answer, whose parts are added with ``event`` and sent with ``flush``."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def flush(self, *, last: bool = False) -> None:
        """Send the added events in one packet. The first flush starts the answer, and ``last`` ends it."""
        if not self.started:
            media_type = self.dialect.media_type.encode()
            await self.begin(200, ((b"content-type", media_type), (b"cache-control", b"no-cache")))
        events = b"".join(self._events)
        self._events.clear()
        self.finished = last
        await self._send({"type": "http.response.body", "body": events, "more_body": not last})

    @asynccontextmanager
    async def answering_errors(self, log: logging.Logger, what: str) -> AsyncIterator[None]:
        """Turn an exception in the block into an error answer, so that one request can't break others.

        A bug in art or in an engine is answered with a 500, and logged with the message ``what``.
        """
        try:
            yield
        except UpstreamError as error:
            await self._fail(error)
        except StoreError as error:
            await self._fail(Refused(str(error), status=503, code="not_recorded"))
        except Exception as error:
            log.exception(what)
            await self._fail(UpstreamError(f"{type(error).__name__}: {error}", status=500))

    async def _fail(self, error: UpstreamError) -> None:
        """Answer with an error. In a stream it is the last event; after a whole answer it is dropped."""
        if self.finished:
            return
        details = str(error), error.status, error.code
        if self.started:
            self.event(self.dialect.error_event(*details))
            return await self.flush(last=True)
        # A retry would be refused again, or repeat the work that took too long.
        final = isinstance(error, Refused) or error.code in ("no_token_ids", TIMED_OUT) or error.status not in RETRIED
        headers = [(b"x-should-retry", b"false")] if final else []
        if error.retry_after is not None and math.isfinite(error.retry_after):
            headers.append((b"retry-after", str(math.ceil(error.retry_after)).encode()))
        await self.answer(error.status, self.dialect.error(*details), tuple(headers))


@dataclass(frozen=True)
class RelayedCall:
    """A request that an engine's ``relay`` sends to a provider itself."""

    path: str
    """Of its dialect; ``model`` is what stands for ``{model}`` in it."""
    model: str | None
    body: bytes
    request_id: str
    record: Callable[[Sequence[Call]], Awaitable[None]]
    """Records the call, one per choice, and returns when it would survive this process."""
    note_progress: Callable[[], None]
    """To be called whenever a part of the answer arrives."""
