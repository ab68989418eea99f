"""A rollout's model calls, passed on to the door behind the server: one address, one token, one certificate for everything.

Knows nothing about what is in them. An answer goes on as it comes, and where the agent goes away the call behind it ends.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import orjson
from yarl import URL

from art_server.guard import Receive, Scope, Send

OF_ONE_CONNECTION = {
    b"authorization", b"connection", b"content-length", b"host", b"keep-alive", b"proxy-authenticate",
    b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    b"x-api-key",
}  # fmt: skip
"""Headers that are not passed on; the token is among them, which is for this server alone."""


class Proxy:
    """An ASGI application. It answers with what the door at ``address``, ``http://HOST:PORT``, answers."""

    def __init__(self, address: str) -> None:
        self._address = address
        # The door has limits of its own, and a call may sample for as long as it likes.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        )

    async def close(self) -> None:
        await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        body, more = [], True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body.append(message.get("body", b""))
            more = message.get("more_body", False)
        passing = asyncio.create_task(self._pass_on(scope, b"".join(body), send))
        leaving = asyncio.create_task(_left(receive))
        leaving.add_done_callback(lambda _: passing.cancel())
        try:
            await passing
        except asyncio.CancelledError:
            if not leaving.done():
                raise  # it is this request that is cancelled
        finally:
            leaving.cancel()

    async def _pass_on(self, scope: Scope, body: bytes, send: Send) -> None:
        query = scope["query_string"].decode("latin-1")
        path = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        asking = self._session.request(
            scope["method"], URL(self._address + path, encoded=True), headers=_kept(scope["headers"]), data=body or None,
            allow_redirects=False, skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
        )  # fmt: skip
        try:
            answer = await asking
        except (aiohttp.ClientError, OSError) as error:
            return await _unreachable(error, send)
        async with answer:
            headers = [(name.lower(), value) for name, value in answer.raw_headers]
            kept = [pair for pair in headers if pair[0] not in OF_ONE_CONNECTION]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            async for chunk in answer.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


def _kept(headers: Any) -> list[tuple[str, str]]:
    return [(n.decode("latin-1"), v.decode("latin-1")) for n, v in headers if n.lower() not in OF_ONE_CONNECTION]


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unreachable(error: Exception, send: Send) -> None:
    said = {"message": f"what serves the policy cannot be reached: {error}", "code": "unreachable"}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": orjson.dumps({"error": said})})
