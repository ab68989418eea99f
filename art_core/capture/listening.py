"""The HTTP server of an ASGI application, and the socket that it listens on."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator

import uvicorn

from art_core.capture.header_limits import BoundedHead
from art_core.capture.http import ASGIApp
from art_core.errors import ConfigError


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs it: uvicorn would raise them again before what was recorded is on disk."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(app: ASGIApp, *, drain: int = 1) -> uvicorn.Server:
    """Return a server for ``app`` that ends when ``should_exit`` is set; calls in flight get ``drain`` seconds then."""
    config = uvicorn.Config(
        app,
        http=BoundedHead,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        # Longer than clients keep an unused connection (httpx 5 s), so that none is closed while a request is on its way.
        timeout_keep_alive=30,
        timeout_graceful_shutdown=drain,
    )
    return _Server(config)


def address_of(host: str, port: int) -> str:
    """Return how to reach a listener from this machine; others need ``host`` to be an address that they can reach."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str | None) -> bool:
    """Whether ``host`` is a name of this machine that no other can reach."""
    try:
        return host == "localhost" or (host is not None and ipaddress.ip_address(host).is_loopback)
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to ``host``; ConfigError where the port is taken or the host is not this machine's."""
    # With its protocol named: asyncio sends small packets without delay only where it finds TCP by name, and a delay costs
    # 40 ms per call.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        # Now, not when the engine is ready: two that only bound the same port would both believe to have it.
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; stop what listens there, give another port, or port=0 for a free one"
            ) from error
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return listener
