"""How each client library sends a request to another address than its caller's.

The caller's own client sends it if it can, so that connections live as long as the client, and answers and streams are those of
the library. A proxy, a socket of its own or a pool for one host can't reach a rollout's address, and rollouts with an event loop
each can't share the connections of one async client; then one of ours sends.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import http.client
import os
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from art_core.plugin_api import Target

KEYS = frozenset(
    {
        "authorization", "x-api-key", "api-key", "x-goog-api-key", "ocp-apim-subscription-key", "cf-aig-authorization",
        "x-portkey-api-key", "x-amz-security-token", "proxy-authorization", "cookie", "host", "openai-organization",
        "openai-project",
    }
)  # fmt: skip
"""Headers of the provider, which are replaced or left out."""
CUSTOM_HEADERS = ("ANTHROPIC_CUSTOM_HEADERS", "OPENAI_CUSTOM_HEADERS")
"""Variables with lines ``name: value``, from which the providers' libraries add headers."""
_forked = False


def _httpx(target: Target, send: Callable[..., Any], transport: Any, request: Any) -> Any:
    """For ``handle_request`` and ``handle_async_request`` of httpx and httpx2; the latter's result is an awaitable."""
    library = sys.modules[type(request).__module__.partition(".")[0]]
    # As bytes, because a header may have any.
    left_out = _left_out(target)
    headers = [(name, value) for name, value in request.headers.raw if name.decode("latin-1").lower() not in left_out]
    ours = {**target.headers, "host": urlsplit(target.url).netloc}
    headers += ((name.encode(), value.encode()) for name, value in ours.items())
    extensions = {name: value for name, value in request.extensions.items() if name not in ("sni_hostname", "target")}
    stream = request.stream
    url = _parsed(library.URL, target.url)
    redirected = library.Request(request.method, url, headers=headers, stream=stream, extensions=extensions)
    if isinstance(transport, library.AsyncHTTPTransport):
        return _send_on_loop(library, send, redirected)
    if _forked or target.url.startswith("https:") or not _reaches_any_host(transport._pool):
        transport = _for_one_answer(library, library.HTTPTransport)
    return send(transport, redirected)


def _for_one_answer(library: ModuleType, kind: type) -> Any:
    # Its connection ends with the answer, because nobody will close the transport.
    return kind(verify=_certificates(), trust_env=False, limits=library.Limits(max_keepalive_connections=0))


async def _send_on_loop(library: ModuleType, send: Callable[..., Any], request: Any) -> Any:
    try:
        held = vars(asyncio.get_running_loop())
    except (RuntimeError, TypeError):  # trio's, or a loop that holds nothing
        return await send(_for_one_answer(library, library.AsyncHTTPTransport), request)
    # The loop itself holds them, because they refer to it: in a table of ours, a loop that nobody closes would stay for ever.
    name = f"_art_{library.__name__}"
    if name not in held:
        lifetime = _transport_of_loop(library, held, name)
        held[name] = (await anext(lifetime), lifetime)  # does not suspend, so no other task of this loop can interfere
    return await send(held[name][0], request)


async def _transport_of_loop(library: ModuleType, held: dict[str, Any], name: str) -> AsyncIterator[Any]:
    # An async generator: the loop closes it on shutdown, and with it the connections.
    async with library.AsyncHTTPTransport(
        verify=_certificates(), trust_env=False, limits=library.Limits()
    ) as transport:
        try:
            yield transport
        finally:
            held.pop(name, None)


@functools.lru_cache(1024)
def _parsed(kind: type, url: str) -> Any:
    """Return an immutable URL: parsing takes a third of the time of a redirection."""
    return kind(url)


def _reaches_any_host(pool: Any) -> bool:
    """Whether a pool of httpcore is without proxy and socket of its own, and speaks HTTP/1.1 without TLS."""
    plain = type(pool).__name__ == "ConnectionPool" and getattr(pool, "_http1", True)
    return plain and not getattr(pool, "_uds", None) and not getattr(pool, "_proxy", None)


def _urllib3(
    target: Target, send: Callable[..., Any], pool: Any, method: str, url: str, body: Any = None, headers: Any = None,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """For ``HTTPConnectionPool.urlopen``, which requests and botocore use too; ``args`` begin with retries, redirect."""
    address = urlsplit(target.url)
    own = _headers(headers if headers is not None else pool.headers, target)
    if not args and kwargs.get("retries") is None and kwargs.get("redirect", True):
        kwargs["retries"] = pool.retries
    if len(args) < 4:
        kwargs.setdefault("timeout", pool.timeout)
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
    if address.scheme == "https":
        ours = http.client.HTTPSConnection(address.netloc, timeout=connection.timeout, context=_certificates())
    else:
        ours = http.client.HTTPConnection(address.netloc, timeout=connection.timeout)
    ours.connect()
    connection.close()
    connection.sock = ours.sock
    own = _headers(headers or {}, target) | {"Host": address.netloc, "Connection": "close"}
    send(connection, method, address.path, body, own, **kwargs)


async def _aiohttp(target: Target, send: Callable[..., Any], session: Any, method: str, url: Any, **kwargs: Any) -> Any:
    """For ``ClientSession._request``: a copy of the session sends, without what is meant for the provider."""
    import aiohttp
    from yarl import URL

    if session.closed:
        return await send(session, method, url, **kwargs)  # raises
    dropped = FOR_THE_PROVIDER - {"auth", "cookies"} if target.keeps_keys else FOR_THE_PROVIDER
    kept = {name: value for name, value in kwargs.items() if name not in dropped}
    kept["headers"] = _headers(dict(kwargs.get("headers") or {}), target)
    if target.url.startswith("https:"):
        kept["ssl"] = _certificates()
    direct = copy.copy(session)
    unset = dict.fromkeys(("_default_proxy", "_default_proxy_auth", "_base_url", "_base_url_origin"))
    if not target.keeps_keys:
        unset["_default_auth"] = None
    left_out = _left_out(target)
    defaults = type(session.headers)(
        (name, value) for name, value in session.headers.items() if name.lower() not in left_out
    )
    jar = aiohttp.DummyCookieJar()
    vars(direct).update(unset, _trust_env=False, _middlewares=(), _default_headers=defaults, _cookie_jar=jar)
    if type(session.connector) is not aiohttp.TCPConnector:
        # Its connection ends with the answer, because nobody will close the connector.
        vars(direct).update(_connector=aiohttp.TCPConnector(force_close=True))
    try:
        return await send(direct, method, URL(target.url, encoded=True), **kept)
    finally:
        direct.detach()


FOR_THE_PROVIDER = frozenset(
    {
        "auth", "compress", "cookies", "fingerprint", "middlewares", "params", "proxy", "proxy_auth", "proxy_headers",
        "server_hostname", "ssl", "ssl_context", "verify_ssl",
    }
)  # fmt: skip
"""Arguments of a request of aiohttp."""


def _headers(headers: Mapping[Any, str], target: Target) -> dict[str, str]:
    left_out = _left_out(target)
    named = ((name.decode("latin-1") if isinstance(name, bytes) else name, value) for name, value in headers.items())
    return {name: value for name, value in named if name.lower() not in left_out} | target.headers


def _left_out(target: Target) -> frozenset[str]:
    if target.keeps_keys:
        return frozenset({"host"})
    lines = "\n".join(os.environ.get(variable, "") for variable in CUSTOM_HEADERS).split("\n")
    return KEYS.union(line.partition(":")[0].strip().lower() for line in lines)


@functools.lru_cache(64)
def _pool(scheme: str, netloc: str) -> Any:
    """Return the connections of this process to an address, shared by all pools of urllib3."""
    from urllib3.connectionpool import connection_from_url

    return connection_from_url(f"{scheme}://{netloc}", maxsize=64)


@functools.cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


def _after_fork() -> None:
    # A forked child must not send on its parent's connections.
    global _forked
    _forked = True
    _pool.cache_clear()


os.register_at_fork(after_in_child=_after_fork)

SENDERS = {"httpx": _httpx, "urllib3": _urllib3, "http": _http, "aiohttp": _aiohttp}
