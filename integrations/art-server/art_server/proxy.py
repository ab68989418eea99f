"""Passes rollouts' model calls on to the capture server, so that one address, token and certificate serve everything.

Answers are passed on as they arrive. If the agent disconnects, the call to the capture server is cancelled.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson
from yarl import URL

from art_server.guard import Receive, Scope, Send

HOP_HEADERS = {
    b"authorization", b"connection", b"content-length", b"host", b"keep-alive", b"proxy-authenticate",
    b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    b"x-api-key",
}  # fmt: skip
"""Headers that aren't passed on, including the token, which is for this server only."""


class Proxy:
    """An ASGI application that answers as the capture server at ``address``, ``http://HOST:PORT``, does."""

    def __init__(self, address: str) -> None:
        self._address = address
        # The capture server has its own limits, and sampling may take any time.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        )

    async def close(self) -> None:
        await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on one request."""
        body, more = [], True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body.append(message.get("body", b""))
            more = message.get("more_body", False)
        passing = asyncio.create_task(self._pass_on(scope, b"".join(body), send))
        disconnected = asyncio.create_task(_wait_for_disconnect(receive))
        disconnected.add_done_callback(lambda _: passing.cancel())
        try:
            await passing
        except asyncio.CancelledError:
            if not disconnected.done():
                raise  # this request itself was cancelled
        finally:
            disconnected.cancel()

    async def _pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        query = scope["query_string"].decode("latin-1")
        path = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        request = self._session.request(
            scope["method"], URL(self._address + path, encoded=True), headers=_passed_on(scope["headers"]), data=body or None,
            allow_redirects=False, skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
        )  # fmt: skip
        try:
            answer = await request
        except (aiohttp.ClientError, OSError) as error:
            return await _unreachable(error, send)
        async with answer:
            headers = [(name.lower(), value) for name, value in answer.raw_headers]
            headers = [pair for pair in headers if pair[0] not in HOP_HEADERS]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            async for chunk in answer.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def _passed_on(headers: Any) -> list[tuple[str, str]]:
    return [(n.decode("latin-1"), v.decode("latin-1")) for n, v in headers if n.lower() not in HOP_HEADERS]


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unreachable(error: Exception, send: Send) -> None:
    details = {"message": f"can't reach the policy's capture server: {error}", "code": "unreachable"}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps({"error": details})})
