"""How each client library sends a request to another address than its caller's.

The caller's own client sends it if it can, so that connections live as long as the client, and answers and streams are those of
the library. A proxy, a socket of its own or a pool for one host can't reach a rollout's address; then a pool of ours sends.
"""

from __future__ import annotations

import functools
import os
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from art_core.plugin_api import Target

KEYS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key", "host"})
"""Headers of the provider, which are replaced or left out."""


def _httpx(target: Target, send: Callable[..., Any], transport: Any, request: Any) -> Any:
    """For ``handle_request`` and ``handle_async_request`` of httpx and httpx2; the latter's result is an awaitable."""
    library = sys.modules[type(request).__module__.partition(".")[0]]
    headers = _headers(dict(request.headers), target) | {"host": urlsplit(target.url).netloc}
    extensions = {name: value for name, value in request.extensions.items() if name != "sni_hostname"}
    stream = request.stream
    redirected = library.Request(request.method, target.url, headers=headers, stream=stream, extensions=extensions)
    pool = transport._pool
    if type(pool).__name__ not in ("ConnectionPool", "AsyncConnectionPool") or getattr(pool, "_uds", None):
        kind = library.HTTPTransport if isinstance(transport, library.HTTPTransport) else library.AsyncHTTPTransport
        # Its connection ends with the answer, because nobody will close the transport.
        limits = library.Limits(max_keepalive_connections=0)
        transport = kind(verify=_certificates(), trust_env=False, limits=limits)
    return send(transport, redirected)


def _urllib3(
    target: Target, send: Callable[..., Any], pool: Any, method: str, url: str, body: Any = None, headers: Any = None,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """For ``HTTPConnectionPool.urlopen``, which requests and botocore use too."""
    address = urlsplit(target.url)
    own = _headers(dict(headers if headers is not None else pool.headers), target)
    kwargs["assert_same_host"] = False
    return send(_pool(address.scheme, address.netloc), method, address.path, body, own, *args, **kwargs)


def _http(
    target: Target, send: Callable[..., Any], connection: Any, method: str, url: str, body: Any = None,
    headers: Mapping[str, str] | None = None, **kwargs: Any,
) -> None:  # fmt: skip
    """For ``http.client.HTTPConnection.request``, which urllib uses; its caller then asks the connection for the answer.

    The connection is given a socket to the rollout's address. It closes it after the answer, and connects to its own host if it
    is used again.
    """
    address = urlsplit(target.url)
    connection.close()
    connection.sock = _socket(address, connection.timeout)
    own = _headers(headers or {}, target) | {"Host": address.netloc, "Connection": "close"}
    send(connection, method, address.path, body, own, **kwargs)


async def _aiohttp(target: Target, send: Callable[..., Any], session: Any, method: str, url: Any, **kwargs: Any) -> Any:
    """For ``ClientSession._request``."""
    from aiohttp import ClientSession
    from yarl import URL

    kept = {
        name: value for name, value in kwargs.items() if name not in ("auth", "params", "proxy", "proxy_auth", "ssl")
    }
    kept["headers"] = _headers(dict(kwargs.get("headers") or {}), target)
    request = method, URL(target.url, encoded=True)
    if not session.trust_env and getattr(session, "_default_proxy", None) is None:
        return await send(session, *request, **kept)
    settings = {"headers": session.headers, "timeout": session.timeout, "raise_for_status": session.raise_for_status}
    async with ClientSession(connector=session.connector, connector_owner=False, **settings) as direct:
        return await send(direct, *request, **kept)


def _headers(headers: Mapping[str, str], target: Target) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in KEYS} | target.headers


def _socket(address: SplitResult, timeout: Any) -> socket.socket:
    port = address.port or (443 if address.scheme == "https" else 80)
    connected = socket.create_connection((address.hostname, port), timeout)
    return (
        _certificates().wrap_socket(connected, server_hostname=address.hostname)
        if address.scheme == "https"
        else connected
    )


@functools.lru_cache(64)
def _pool(scheme: str, netloc: str) -> Any:
    """Return the connections of this process to an address, shared by all pools of urllib3."""
    from urllib3.connectionpool import connection_from_url

    return connection_from_url(f"{scheme}://{netloc}", maxsize=64)


@functools.cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


# A forked child must not send on its parent's connections.
os.register_at_fork(after_in_child=_pool.cache_clear)

SENDERS = {"httpx": _httpx, "urllib3": _urllib3, "http": _http, "aiohttp": _aiohttp}
