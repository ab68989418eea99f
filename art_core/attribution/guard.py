"""Inside a rollout, a model call that was not redirected and may not leave is refused before it is sent.

The functions that send HTTP requests are wrapped and, as the last resort for clients with sockets of their own, those that
begin TLS.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from art_core.attribution.providers import at_provider, model_call
from art_core.attribution.rollouts import assigned, current_rollout, destination, exempted, live
from art_core.attribution.wrapping import Function, Wrap, lock, wrap_while_live
from art_core.errors import CallRefused, CaptureError
from art_core.types import RolloutAddress

USE_ADDRESS = (
    "install the plugin of its client library ('art plugins' lists what is installed and what is missing), or let the agent "
    "take a second argument and use address.base_url"
)
TO_DO = (
    f"{USE_ADDRESS}; if the call should go there, name its model in passthrough=, or make it inside art_core.exempt()"
)
_checked: ContextVar[bool] = ContextVar("art_checked", default=False)
"""Whether this context is sending a request that may leave, so that the layers below need not check it again."""


def elsewhere(rollout_id: str) -> dict[str, dict[str, int]]:
    """Return how many model calls of a live rollout were ``refused``, and how many ``passed`` through, by destination."""
    counts = next((it.elsewhere for it in list(live.values()) if it.address.rollout_id == rollout_id), {})
    return {kind: dict(counts.get(kind, {})) for kind in ("refused", "passed")}


def _check(method: str, url: str, body: Callable[[], Any], client: str) -> None:
    """Raise CallRefused if a request must not leave. A rollout's model calls are counted either way."""
    parts = urlsplit(url)
    call = model_call(method, parts.hostname or "", parts.path, body)
    if call is None or _endpoint(url) in map(_endpoint, list(live)):
        return
    address = current_rollout.get()
    if address is None and not call.at_provider:
        return
    passing = {_short(name): name for name in address.passthrough} if address else {}
    model = passing.get(_short(call.model or ""), call.model)
    where = f"{method} {parts.hostname}{parts.path}"
    _check_leaves(address, model, where, f"{where} (model {call.model!r}, sent by {client})")


def _check_leaves(address: RolloutAddress | None, model: str | None, where: str, what: str) -> None:
    try:
        refused = destination(model) is not None
    except CaptureError as error:
        raise CallRefused(str(error)) from error
    if address is not None and (rollout := live.get(address.base_url)):
        with lock:
            rollout.elsewhere["refused" if refused else "passed"][where] += 1
    if refused:
        raise CallRefused(
            f"{what} was refused before it left: inside a rollout the policy answers model calls, and this one was not "
            f"redirected; {TO_DO}"
        )


@functools.lru_cache(1024)
def _endpoint(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _short(model: str) -> str:
    """Remove the provider's name, which frameworks put before the model's."""
    return model.rpartition("/")[2]


def _check_httpx(_transport: Any, request: Any) -> Any:
    library = sys.modules[type(request).__module__.partition(".")[0]]
    try:
        _check(request.method, str(request.url), lambda: _content(request), library.__name__)
    except CallRefused as refusal:
        if "x-stainless-lang" not in request.headers:
            raise
        # The SDKs that send this header take an exception for a lost connection and retry.
        error = {"type": "permission_error", "code": "not_captured", "message": str(refusal)}
        answer = {"type": "error", "error": error}
        return library.Response(403, json=answer, headers={"x-should-retry": "false"}, request=request)


def _content(request: Any) -> Any:
    try:
        return request.content
    except RuntimeError:  # a stream, which can be read only once
        return None


def _check_http(self: Any, method: str, url: str, body: Any = None, *_args: Any, **_kwargs: Any) -> None:
    """For connections of ``http.client`` and pools of urllib3, which connect before they request."""
    if not url.startswith("http"):  # a whole URL is for a proxy
        scheme = getattr(self, "scheme", None) or ("https" if self.default_port == 443 else "http")
        host = (getattr(self, "_tunnel_host", None) or self.host).strip("[]")
        port = getattr(self, "_tunnel_port", None) or self.port
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{url}"
    _check(method, url, lambda: body, type(self).__module__.partition(".")[0])


def _check_aiohttp(self: Any, method: str, url: Any, **kwargs: Any) -> None:
    _check(method, str(self._build_url(url)), lambda: kwargs.get("json") or kwargs.get("data"), "aiohttp")


def _check_tls(position: int) -> Function:
    """Check the host, which is ``server_hostname`` or the argument at ``position``; the model is not known."""

    def check(*args: Any, server_hostname: Any = None, **_: Any) -> None:
        host = args[position] if len(args) > position else server_hostname
        address = current_rollout.get()
        if address is not None and isinstance(host, str) and at_provider(host):
            _check_leaves(address, None, host, f"a connection to {host} (by a client with sockets of its own)")

    return check


@contextmanager
def _guarding(check: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    if not live or exempted.get() or _checked.get():
        yield None
    else:
        answer = check(*args, **kwargs)
        with assigned(_checked, True):
            yield answer


def _guarded(check: Function, *, is_async: bool = False) -> Wrap:
    """Call ``check`` with the arguments first: it raises, or returns an answer that is returned instead, or None."""

    def wrap_function(send: Function) -> Function:
        @functools.wraps(send)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with _guarding(check, args, kwargs) as answer:
                return send(*args, **kwargs) if answer is None else answer

        @functools.wraps(send)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            with _guarding(check, args, kwargs) as answer:
                return await send(*args, **kwargs) if answer is None else answer

        return async_wrapper if is_async else wrapper

    return wrap_function


for library in ("httpx", "httpx2"):
    wrap_while_live(_guarded(_check_httpx), f"{library}:HTTPTransport.handle_request")
    wrap_while_live(_guarded(_check_httpx, is_async=True), f"{library}:AsyncHTTPTransport.handle_async_request")
wrap_while_live(
    _guarded(_check_http), "http.client:HTTPConnection.request", "urllib3.connectionpool:HTTPConnectionPool.urlopen"
)
wrap_while_live(_guarded(_check_aiohttp, is_async=True), "aiohttp:ClientSession._request")
wrap_while_live(_guarded(_check_tls(5)), "ssl:SSLContext.wrap_socket")
wrap_while_live(_guarded(_check_tls(4)), "ssl:SSLContext.wrap_bio")
