"""Inside a rollout no call to a model leaves that was not redirected and is not meant to: it fails before it is sent.

While a rollout is live, the functions that send HTTP requests are wrapped, and as the last resort for clients that have sockets
of their own, those that begin TLS. Knows nothing about what redirects calls.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from art_core.attribution.live import Function, current_rollout, exempted, live, while_live
from art_core.attribution.providers import at_provider, model_call
from art_core.attribution.redirection import destination
from art_core.errors import CallRefused, CaptureError

TO_DO = (
    "install the plugin of its client library ('art plugins' lists what is installed and what is missing), or let the agent "
    "take a second argument and use address.base_url; if the call should go there, name its model in passthrough=, or make "
    "it inside art_core.exempt()"
)
_looked_at: ContextVar[bool] = ContextVar("art_looked_at", default=False)
"""Whether a request is on its way that may leave: what is below need not look again."""


@contextmanager
def _looking() -> Iterator[None]:
    token = _looked_at.set(True)
    try:
        yield
    finally:
        _looked_at.reset(token)


def _nobodys() -> bool:
    return not live.count or exempted.get() or _looked_at.get()


def refusal(method: str, url: str, body: Callable[[], Any], client: str) -> str | None:
    """Return why this request must not leave, or None if it may; either is counted if it asks a model inside a rollout."""
    parts = urlsplit(url)
    call = model_call(method, parts.hostname or "", parts.path, body)
    if call is None or _endpoint(url) in map(_endpoint, list(live.addresses)):
        return None
    address = current_rollout.get()
    if address is None and not call.at_provider:
        return None
    passing = {_short(name): name for name in address.passthrough} if address else {}
    try:
        leaves = destination(passing.get(_short(call.model or ""), call.model)) is None
    except CaptureError as error:
        return str(error)
    where = f"{method} {parts.hostname}{parts.path}"
    if address is not None:
        live.went_elsewhere(address, where, refused=not leaves)
    return None if leaves else _refused(f"{where} (model {call.model!r}, sent by {client})")


def elsewhere(rollout_id: str) -> dict[str, dict[str, int]]:
    """Return where the model calls of a live rollout were to go that were ``refused``, and where those went that ``passed``."""
    counted = live.elsewhere.get(rollout_id, {})
    return {"refused": dict(counted.get(True, {})), "passed": dict(counted.get(False, {}))}


def _refused(what: str) -> str:
    return (
        f"{what} was refused before it left: inside a rollout the policy answers model calls, and this one was not "
        f"redirected; {TO_DO}"
    )


@functools.lru_cache(1024)
def _endpoint(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _short(model: str) -> str:
    """Frameworks put the provider's name before the model's."""
    return model.rpartition("/")[2]


def _answered(request: Any, reason: str) -> Any:
    """Return the refusal as the answer of a server, for SDKs that would take an exception for a lost connection and retry."""
    module = sys.modules[type(request).__module__.partition(".")[0]]
    error = {"type": "error", "error": {"type": "permission_error", "code": "not_captured", "message": reason}}
    return module.Response(403, json=error, headers={"x-should-retry": "false"}, request=request)


def _retries_exceptions(request: Any) -> bool:
    return "x-stainless-lang" in request.headers


def _content(request: Any) -> Any:
    try:
        return request.content
    except RuntimeError:  # a stream: it can be read once only
        return None


def _sending(send: Function) -> Function:
    """Wrap the transports of httpx and of what has its interface."""

    @functools.wraps(send)
    def guarded(self: Any, request: Any) -> Any:
        if _nobodys():
            return send(self, request)
        if reason := _reason(request):
            return _answered(request, reason)
        with _looking():
            return send(self, request)

    return guarded


def _sending_async(send: Function) -> Function:
    @functools.wraps(send)
    async def guarded(self: Any, request: Any) -> Any:
        if _nobodys():
            return await send(self, request)
        if reason := _reason(request):
            return _answered(request, reason)
        with _looking():
            return await send(self, request)

    return guarded


def _reason(request: Any) -> str | None:
    """Return why an SDK's request must not leave; raises CallRefused for one that nobody would send again."""
    client = type(request).__module__.partition(".")[0]
    reason = refusal(request.method, str(request.url), lambda: _content(request), client)
    if reason and not _retries_exceptions(request):
        raise CallRefused(reason)
    return reason


def _requesting(request: Function) -> Function:
    """Wrap the connections of ``http.client`` and the pools of urllib3, which connect before they request."""

    @functools.wraps(request)
    def guarded(self: Any, method: str, url: str, body: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _nobodys():
            return request(self, method, url, body, *args, **kwargs)
        whole = url
        if not url.startswith("http"):  # else it goes to a proxy
            scheme = getattr(self, "scheme", None) or ("https" if self.default_port == 443 else "http")
            host = (getattr(self, "_tunnel_host", None) or self.host).strip("[]")
            port = getattr(self, "_tunnel_port", None) or self.port
            whole = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{url}"
        if reason := refusal(method, whole, lambda: body, type(self).__module__.partition(".")[0]):
            raise CallRefused(reason)
        with _looking():
            return request(self, method, url, body, *args, **kwargs)

    return guarded


def _asking(request: Function) -> Function:
    """Wrap aiohttp's session."""

    @functools.wraps(request)
    async def guarded(self: Any, method: str, url: Any, **kwargs: Any) -> Any:
        if _nobodys():
            return await request(self, method, url, **kwargs)
        body = kwargs.get("json") or kwargs.get("data")
        if reason := refusal(method, str(self._build_url(url)), lambda: body, "aiohttp"):
            raise CallRefused(reason)
        with _looking():
            return await request(self, method, url, **kwargs)

    return guarded


def _securing(position: int) -> Callable[[Function], Function]:
    """Wrap what begins TLS: the host is known, the model is not."""

    def around(begin: Function) -> Function:
        @functools.wraps(begin)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            host = args[position] if len(args) > position else kwargs.get("server_hostname")
            address = current_rollout.get()
            if address is not None and not _nobodys() and isinstance(host, str) and at_provider(host):
                leaves = destination(None) is None
                live.went_elsewhere(address, host, refused=not leaves)
                if not leaves:
                    raise CallRefused(_refused(f"a connection to {host} (by a client with sockets of its own)"))
            return begin(*args, **kwargs)

        return guarded

    return around


for library in ("httpx", "httpx2"):
    while_live(f"{library}:HTTPTransport", "handle_request", _sending)
    while_live(f"{library}:AsyncHTTPTransport", "handle_async_request", _sending_async)
while_live("http.client:HTTPConnection", "request", _requesting)
while_live("urllib3.connectionpool:HTTPConnectionPool", "urlopen", _requesting)
while_live("aiohttp:ClientSession", "_request", _asking)
while_live("ssl:SSLContext", "wrap_socket", _securing(5))
while_live("ssl:SSLContext", "wrap_bio", _securing(4))
