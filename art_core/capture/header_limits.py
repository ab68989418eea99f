"""How large and how slow what comes before a request's body may be. Knows nothing about what is asked.

uvicorn's faster parser takes a head of any size, and waits for it for ever: open to whoever reaches the port, token or not.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 * 2**10
"""Bytes in a row that are no body: of a request line with its headers, of a chunk's size, of what follows the last chunk."""
HEAD_SECONDS = 20.0
"""From the connection, or a request's first byte, to the end of its headers."""


class BoundedHead(HttpToolsProtocol):
    """One connection."""

    _beside = 0
    """Bytes since the last that were body. Counted as they come from the socket, up to 256 KiB late."""
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._beside += len(data)
        super().data_received(data)
        if self._beside > MAX_HEAD and not self.transport.is_closing() and self.transport.get_protocol() is self:
            self._refuse(b"431 Request Header Fields Too Large", f"at most {MAX_HEAD} bytes of headers are taken here")

    def on_message_begin(self) -> None:
        self._beside = 0
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_is_there()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._beside = 0
        super().on_body(body)

    def _expect_head(self) -> None:
        self._head_is_there()
        self._late = self.loop.call_later(HEAD_SECONDS, self._too_late)

    def _head_is_there(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._refuse(b"408 Request Timeout", f"the headers of a request have to come within {HEAD_SECONDS:g} seconds")

    def _refuse(self, status: bytes, why: str) -> None:
        said: Any = why.encode()
        head = b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(said)) + said)
        self.transport.close()
