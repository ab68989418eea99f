"""Access control around every route and the WebSocket's handshake: token, origin, host name, and size of a request.

It is raw ASGI, so that a body is counted as it arrives and a handshake is refused with an HTTP answer.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any

import orjson

from art_core.capture import BODY_SECONDS, is_loopback

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY = 64 * 2**20
"""Bytes per request."""
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+))(?::\d*)?", re.ASCII)
TOKEN_NEEDED = (
    "this server requires a token: send it as 'Authorization: Bearer TOKEN', or as the password in a browser; an agent passes "
    "address.api_key to its client"
)
SAFE = ("GET", "HEAD", "OPTIONS")


class Guard:
    """Passes on requests with ``token``, as ``Authorization: Bearer``, ``X-Api-Key`` (Anthropic's clients) or the password of
    basic authentication (browsers).

    Without a token, only requests to this machine's own names are passed on, because another site's name can resolve to
    127.0.0.1 (DNS rebinding). Pages of other origins may not open the WebSocket or change anything.
    """

    def __init__(
        self, app: App, *, token: str | None, max_body: int = MAX_BODY, body_seconds: float = BODY_SECONDS
    ) -> None:
        self._app, self._token, self._max_body, self._body_seconds = app, token, max_body, body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._refusal(scope, headers)
        if refused is not None:
            return await _refuse(scope, send, *refused)
        if scope["type"] == "websocket":
            return await self._app(scope, receive, send)
        body = _Body(receive, send, self._max_body, self._body_seconds)
        try:
            with suppress(_BadBody):  # answered below, however the application handled it
                await self._app(scope, body.receive, body.send)
        except asyncio.CancelledError:  # the server is stopping: a 503 lets the client retry
            if body.answered:
                raise
            return await _refuse(scope, send, 503, "the server is stopping")
        if body.refused is not None and not body.answered:
            await _refuse(scope, send, *body.refused)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        if self._token is None:
            if not is_loopback(_host(headers.get("host", ""))):
                return (
                    421,
                    "this server only answers to this machine's own names; start it with a token to allow others",
                )
        elif not self._knows_token(headers.get("authorization", "")) and not self._is_token(
            headers.get("x-api-key", "")
        ):
            return 401, TOKEN_NEEDED
        changes = scope["type"] == "websocket" or scope.get("method") not in SAFE
        origin = headers.get("origin")
        if changes and origin is not None and origin.partition("://")[2] != headers.get("host"):
            return 403, f"requests from pages of {origin:.100} aren't allowed"
        length = headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._max_body):
            return 413, f"a request may have at most {self._max_body} bytes, this one has {length:.20}"
        return None

    def _knows_token(self, authorization: str) -> bool:
        scheme, _, value = authorization.partition(" ")
        if scheme.lower() == "basic":
            try:
                value = base64.b64decode(value.encode(), validate=True).decode().partition(":")[2]
            except ValueError:  # invalid base64 or UTF-8
                return False
        elif scheme.lower() != "bearer":
            return False
        return self._is_token(value.strip())

    def _is_token(self, value: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(value.encode(), self._token.encode())


class _Body:
    """A request's body as it arrives, with limits on its size and its time."""

    def __init__(self, receive: Receive, send: Send, max_bytes: int, seconds: float) -> None:
        self._receive, self._send, self._max_bytes, self._seconds = receive, send, max_bytes, seconds
        self._received_bytes, self._complete, self._started = 0, False, asyncio.get_running_loop().time()
        self.answered = False
        """Whether the application has started to answer."""
        self.refused: tuple[int, str] | None = None

    async def receive(self) -> MutableMapping[str, Any]:
        if self._complete:
            return await self._receive()  # waits for the client's disconnect, which may take as long as the answer
        try:
            async with asyncio.timeout_at(self._started + self._seconds):
                message = await self._receive()
        except TimeoutError:
            return self._refuse(408, f"the body of a request must arrive within {self._seconds:g} seconds")
        self._received_bytes += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._received_bytes > self._max_bytes:
            return self._refuse(413, f"a request may have at most {self._max_bytes} bytes")
        return message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self.refused is None or self.answered:
            self.answered = True
            await self._send(message)

    def _refuse(self, status: int, reason: str) -> MutableMapping[str, Any]:
        self.refused = status, reason
        raise _BadBody(reason)


class _BadBody(Exception):
    """Stops the application that was reading the body."""


def _host(header: str) -> str | None:
    match = _HOST.fullmatch(header)
    return match and (match[1] or match[2])


async def _refuse(scope: Scope, send: Send, status: int, message: str) -> None:
    kind = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    headers: Iterable[tuple[bytes, bytes]] = [(b"content-type", b"application/json")]
    if status == 401:
        headers = [*headers, (b"www-authenticate", b'Basic realm="art", charset="UTF-8"')]
    if status == 408:
        headers = [*headers, (b"connection", b"close")]
    body = orjson.dumps({"detail": message, "error": {"message": message, "code": status}})
    await send({"type": f"{kind}.start", "status": status, "headers": list(headers)})
    await send({"type": f"{kind}.body", "body": body})
