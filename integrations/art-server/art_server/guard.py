"""Who may ask, from which pages, and how much at once: around every route, the WebSocket's handshake too.

Knows nothing about what the routes do. Raw ASGI, so that a body is counted as it arrives and a handshake is refused as HTTP.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

import orjson

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY = 64 * 2**20
"""Bytes of one request."""
SAFE = ("GET", "HEAD", "OPTIONS")


class Guard:
    """Lets through whoever knows ``token``, as ``Authorization: Bearer``, or as Basic's password for browsers.

    Without a token: requests by this machine's own names only, because a page of another site can reach 127.0.0.1 by a name
    of its own. Pages of other origins may not open the WebSocket nor send what changes anything.
    """

    def __init__(self, app: App, *, token: str | None, max_body: int = MAX_BODY) -> None:
        self._app, self._token, self._max_body = app, token, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._refusal(scope, headers)
        if refused is not None:
            return await _refuse(scope, send, *refused)
        if scope["type"] == "websocket":
            return await self._app(scope, receive, send)
        begun = False

        async def telling(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, self._counted(receive), telling)
        except _TooLarge:
            await _refuse(scope, send, 413, f"a request has at most {self._max_body} bytes here")
        except asyncio.CancelledError:  # by the end of the server, which is no fault of what was asked: ask again
            if begun:
                raise
            await _refuse(scope, send, 503, "the server is ending")

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str] | None:
        if self._token is None:
            if not is_local(urlsplit(f"//{headers.get('host', '')}").hostname):
                return 421, "this server answers to this machine's own names only; start it with a token for others"
        elif not self._knows_token(headers.get("authorization", "")):
            return 401, "a token is needed: send it as 'Authorization: Bearer TOKEN', or as the password in a browser"
        changes = scope["type"] == "websocket" or scope.get("method") not in SAFE
        origin = headers.get("origin")
        if changes and origin is not None and urlsplit(origin).netloc != headers.get("host"):
            return 403, f"a page of {origin:.100} may not do this"
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body:
            return 413, f"a request has at most {self._max_body} bytes here, this one {length:.20}"
        return None

    def _knows_token(self, authorization: str) -> bool:
        scheme, _, value = authorization.partition(" ")
        if scheme.lower() == "basic":
            try:
                value = base64.b64decode(value, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                return False
        elif scheme.lower() != "bearer":
            return False
        assert self._token is not None
        return hmac.compare_digest(value.strip().encode(), self._token.encode())

    def _counted(self, receive: Receive) -> Receive:
        seen = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                raise _TooLarge
            return message

        return counted


class _TooLarge(Exception):
    """Of a body whose length was not said."""


def is_local(host: str | None) -> bool:
    """Whether ``host`` is a name of this machine that no other can reach."""
    if host is None:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _refuse(scope: Scope, send: Send, status: int, message: str) -> None:
    kind = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
    headers: Iterable[tuple[bytes, bytes]] = [(b"content-type", b"application/json")]
    if status == 401:
        headers = [*headers, (b"www-authenticate", b'Basic realm="art", charset="UTF-8"')]
    body = orjson.dumps({"detail": message, "error": {"message": message, "code": status}})
    await send({"type": f"{kind}.start", "status": status, "headers": list(headers)})
    await send({"type": f"{kind}.body", "body": body})
