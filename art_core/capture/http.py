"""One HTTP request and its answer in OpenAI's shapes, over raw ASGI. Knows nothing about rollouts or models."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any

import orjson

from art_core.capture.upstream import TIMED_OUT
from art_core.errors import StoreError, UpstreamError
from art_core.types import JsonDict

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
BODY_SECONDS = 120.0
"""From a request's headers to the end of its body."""
RETRIED = frozenset({408, 409, 429, 500, 502, 503, 504})
"""What OpenAI's clients retry by themselves unless the answer says otherwise."""


class Refused(UpstreamError):
    """The door itself refuses; sending the same again changes nothing, so clients are told not to."""


def no_retry(error: UpstreamError) -> bool:
    """Whether sending the same request again would be refused again, or would double the work that took too long."""
    return isinstance(error, Refused) or error.code in ("no_token_ids", TIMED_OUT) or error.status not in RETRIED


def error_body(message: str, status: int, code: str | None) -> JsonDict:
    """Return OpenAI's error shape."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_line(error: Exception) -> str:
    """Return in one line what a request was answered with."""
    status, code = getattr(error, "status", 500), getattr(error, "code", None)
    return " ".join(f"{status} {f'{code}: ' if code else ''}{error}".split())[:500]


class Exchange:
    """A request's headers and body, and the one answer to it.

    ``speaks`` says errors in another shape than OpenAI's where it has ``error(message, status, code) -> body`` and, for one
    inside a stream, ``error_event(message, status, code) -> event``.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._scope = scope
        self._receive = receive
        self._send = send
        self._events: list[bytes] = []
        self.started = False
        self.finished = False
        """The whole answer has been handed over."""
        self.speaks: object = None

    @cached_property
    def headers(self) -> dict[str, str]:
        """Of the request, by their names in lower case."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self._scope["headers"]}

    async def body(self, limit: int) -> bytes | None:
        """Return the whole body; None where the client left before sending all of it. Refused (413) beyond ``limit``, and (408)
        where it takes longer than ``BODY_SECONDS``."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await self._read(limit)
        except TimeoutError as error:
            raise Refused(f"the body of a request has to come within {BODY_SECONDS:g} seconds", status=408) from error

    async def _read(self, limit: int) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        # What will be refused is not kept meanwhile.
        promised = self.headers.get("content-length", "")
        keep = not (promised.isdecimal() and int(promised) > limit)
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                return None
            size += len(message.get("body", b""))
            # Read on without keeping: a client that is still sending would miss the answer.
            if keep and size <= limit:
                parts.append(message.get("body", b""))
            else:
                parts.clear()
            if not message.get("more_body"):
                break
        if size > limit:
            raise Refused(f"the request body has {size} bytes; at most {limit} are taken here", status=413)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def disconnected(self) -> None:
        """Return when the client has gone."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, body: JsonDict, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Send a whole JSON answer."""
        content = orjson.dumps(body)
        head = ((b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()), *headers)
        self.started = self.finished = True
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": content})

    def event(self, event: bytes) -> None:
        """Take the next server-sent event, for ``flush`` to send with others that are there already."""
        self._events.append(event)

    async def flush(self) -> None:
        """Send the events taken; the first one starts the answer."""
        if not self.started:
            self.started = True
            head = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
            await self._send({"type": "http.response.start", "status": 200, "headers": head})
        events, self._events = b"".join(self._events), []
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        """End a stream, with the events that are left."""
        if not self.started:
            await self.flush()
        events, self._events = b"".join(self._events), []
        self.finished = True
        await self._send({"type": "http.response.body", "body": events})

    @asynccontextmanager
    async def failing_as_answer(self, log: logging.Logger, what: str) -> AsyncIterator[None]:
        """Answer with what the block raises: the boundary between one request and the serving of all others.

        A bug, ours or an engine's, is logged as ``what`` and answered with a 500.
        """
        try:
            yield
        except UpstreamError as error:
            await self.fail(error)
        except StoreError as error:
            await self.fail(Refused(str(error), status=503, code="not_recorded"))
        except Exception as error:
            log.exception(what)
            await self.fail(UpstreamError(f"{type(error).__name__}: {error}", status=500))

    async def fail(self, error: UpstreamError) -> None:
        """Answer with an error; inside a stream that has begun it becomes the last event."""
        if self.finished:
            return
        said = str(error), error.status, error.code
        body = getattr(self.speaks, "error", error_body)(*said)
        if self.started:
            event = getattr(self.speaks, "error_event", lambda *_: b"data: " + orjson.dumps(body) + b"\n\n")(*said)
            self.event(event.encode() if isinstance(event, str) else event)
            return await self.end()
        headers = [(b"x-should-retry", b"false")] if no_retry(error) else []
        if error.retry_after is not None and math.isfinite(error.retry_after):
            headers.append((b"retry-after", str(math.ceil(error.retry_after)).encode()))
        await self.answer(error.status, body, tuple(headers))
