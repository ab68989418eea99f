"""The HTTP server of an ASGI application: its socket, and the limits on what comes before a request's body.

uvicorn's faster parser accepts request heads of any size and waits for them forever, from anyone who reaches the port.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from art_core.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

MAX_HEAD = 64 * 2**10
"""Bytes in a row that aren't body: a request line with headers, a chunk's size, or what follows the last chunk."""
HEAD_SECONDS = 20.0
"""From the connection, or a request's first byte, to the end of its headers."""
LATE = f"the headers of a request must arrive within {HEAD_SECONDS:g} seconds"


class LimitedHeadProtocol(HttpToolsProtocol):
    """A connection that limits the size of request heads and the time they take."""

    _head_bytes = 0
    """Bytes since the last body byte. They are counted as they come from the socket, so up to 256 KiB late."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD and not self.transport.is_closing() and self.transport.get_protocol() is self:
            self._refuse(b"431 Request Header Fields Too Large", f"the limit is {MAX_HEAD} bytes of headers")

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._start_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._refuse, b"408 Request Timeout", LATE)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: bytes, why: str) -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        body = why.encode()
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()


class _Server(uvicorn.Server):
    """Leaves signals to its caller, because uvicorn would raise them again before the recorded calls are on disk."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: ASGIApp, *, drain: int = 1) -> uvicorn.Server:
    """Return a server that stops when ``should_exit`` is set. Calls in flight then have ``drain`` seconds left."""
    config = uvicorn.Config(
        app,
        http=LimitedHeadProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        # Longer than clients keep an idle connection (httpx: 5 s), so that none closes as a request is sent on it.
        timeout_keep_alive=30,
        timeout_graceful_shutdown=drain,
    )
    return _Server(config)


def address_of(host: str, port: int) -> str:
    """Return a listener's URL for this machine's clients; for others, ``host`` must be an address they can reach."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str | None) -> bool:
    """Whether ``host`` is a name of this machine that no other machine can reach."""
    try:
        return host == "localhost" or (host is not None and ipaddress.ip_address(host).is_loopback)
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to ``host``. Raises ConfigError if the port is taken or the host isn't this machine's."""
    # IPPROTO_TCP is explicit because asyncio sets TCP_NODELAY only then; without it a call takes 40 ms longer.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Now rather than when the engine is ready, because two processes can both bind a port that neither listens on.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; stop the program that listens there, or pass another port "
                "(0 picks a free one)"
            ) from error
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listener
