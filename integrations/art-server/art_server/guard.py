"""Who may ask, from which pages, and how much at once: around every route, the WebSocket's handshake too.

Knows nothing about what the routes do. Raw ASGI, so that a body is counted as it arrives and a handshake is refused as HTTP.
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
"""Bytes of one request."""
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+))(?::\d*)?", re.ASCII)
NEEDED = (
    "a token is needed: send it as 'Authorization: Bearer TOKEN', or as the password in a browser; an agent's client is given "
    "address.api_key"
)
SAFE = ("GET", "HEAD", "OPTIONS")


class Guard:
    """Lets through whoever knows ``token``, as ``Authorization: Bearer``, as ``X-Api-Key`` (Anthropic's clients), or as
    Basic's password for browsers.

    Without a token: requests by this machine's own names only, because a page of another site can reach 127.0.0.1 by a name
    of its own. Pages of other origins may not open the WebSocket nor send what changes anything.
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
            with suppress(_BadBody):  # told below, whatever the application makes of it
                await self._app(scope, body.receive, body.send)
        except asyncio.CancelledError:  # by the end of the server, which is no fault of what was asked: ask again
            if body.answered:
                raise
            return await _refuse(scope, send, 503, "the server is ending")
        if body.refused is not None and not body.answered:
            await _refuse(scope, send, *body.refused)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        if self._token is None:
            if not is_loopback(_host(headers.get("host", ""))):
                return 421, "this server answers to this machine's own names only; start it with a token for others"
        elif not self._knows_token(headers.get("authorization", "")) and not self._is_token(
            headers.get("x-api-key", "")
        ):
            return 401, NEEDED
        changes = scope["type"] == "websocket" or scope.get("method") not in SAFE
        origin = headers.get("origin")
        if changes and origin is not None and origin.partition("://")[2] != headers.get("host"):
            return 403, f"a page of {origin:.100} may not do this"
        length = headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._max_body):
            return 413, f"a request has at most {self._max_body} bytes here, this one {length:.20}"
        return None

    def _knows_token(self, authorization: str) -> bool:
        scheme, _, value = authorization.partition(" ")
        if scheme.lower() == "basic":
            try:
                value = base64.b64decode(value.encode(), validate=True).decode().partition(":")[2]
            except ValueError:  # neither base64 nor UTF-8 is assured
                return False
        elif scheme.lower() != "bearer":
            return False
        return self._is_token(value.strip())

    def _is_token(self, value: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(value.encode(), self._token.encode())


class _Body:
    """A request's body on its way in: counted, and not waited for for ever."""

    def __init__(self, receive: Receive, send: Send, most: int, seconds: float) -> None:
        self._receive, self._send, self._most, self._seconds = receive, send, most, seconds
        self._seen, self._ended, self._began = 0, False, asyncio.get_running_loop().time()
        self.answered = False
        """Whether the application has begun to answer."""
        self.refused: tuple[int, str] | None = None

    async def receive(self) -> MutableMapping[str, Any]:
        if self._ended:
            return await self._receive()  # of the client going away: that may take as long as the answer
        try:
            async with asyncio.timeout_at(self._began + self._seconds):
                message = await self._receive()
        except TimeoutError:
            return self._refuse(408, f"the body of a request has to come within {self._seconds:g} seconds")
        self._seen += len(message.get("body", b""))
        self._ended = not message.get("more_body", False)
        if self._seen > self._most:
            return self._refuse(413, f"a request has at most {self._most} bytes here")
        return message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self.refused is None or self.answered:
            self.answered = True
            await self._send(message)

    def _refuse(self, status: int, why: str) -> MutableMapping[str, Any]:
        self.refused = status, why
        raise _BadBody(why)


class _BadBody(Exception):
    """Ends whatever was reading it."""


def _host(header: str) -> str | None:
    found = _HOST.fullmatch(header)
    return found and (found[1] or found[2])


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
