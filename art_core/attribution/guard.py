"""Inside a rollout, a model call that its client library's plugin did not redirect and that may not leave is sent to the
rollout's address, if a plugin can, or else refused.

The functions that send HTTP requests are wrapped and, as the last resort for clients with sockets of their own, those that
begin TLS.
"""

from __future__ import annotations

import functools
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from art_core.attribution.names import caller_headers
from art_core.attribution.providers import at_provider, model_call
from art_core.attribution.rollouts import assigned, current_rollout, destination, exempted, live
from art_core.attribution.workers import variables_of_programs
from art_core.attribution.wrapping import Function, Wrap, lock, wrap_while_live
from art_core.errors import CallRefused, CaptureError
from art_core.types import RolloutAddress

USE_ADDRESS = (
    "install the plugin of its client library ('art plugins' lists what is installed and what is missing), or let the agent "
    "take a second argument and use address.base_url"
)
LET_IT_GO = "if the call should go there, name its model in passthrough=, or make it inside art_core.exempt()"
TO_DO = f"if docs/dialects.md lists this API, {USE_ADDRESS}; {LET_IT_GO}"
OTHER_API = f"no installed dialect answers this API: docs/dialects.md lists all, and what to install; {LET_IT_GO}"
RELAY = "x-art-url"
"""The header that says where a relayed request goes."""
_checked: ContextVar[bool] = ContextVar("art_checked", default=False)
"""Whether this context is sending a request that may leave, so that the layers below need not check it again."""


class Target(NamedTuple):
    """Where a rollout answers a request."""

    url: str
    headers: dict[str, str]
    """To be set beside the request's own."""
    keeps_keys: bool = False
    """Whether the request is relayed to its provider, so that the headers meant for it stay."""


Sender = Callable[..., Any]
_path_of: Callable[[str], str | None] = lambda _: None  # noqa: E731 - replaced by redirect_requests
_senders: dict[str, Sender] = {}


def redirect_requests(
    path_of: Callable[[str], str | None], senders: Mapping[str, Sender], variables: Mapping[str, str]
) -> None:
    """Send requests that belong to a rollout to its address instead of refusing them; for a plugin.

    ``path_of(path)`` returns the path below the rollout's address that answers a provider's ``path``, or None. ``senders`` are
    called as ``sender(target, send, *args, **kwargs)`` with the arguments of the wrapped function ``send``: by library,
    ``httpx`` (also for httpx2), ``http``, ``urllib3`` and ``aiohttp``; the result of an async one is awaited.
    ``variables`` are set in the programs that a rollout starts, beside those of its address.
    """
    global _path_of
    _path_of = path_of
    _senders.update(senders)
    variables_of_programs.update(variables)


def elsewhere(rollout_id: str) -> dict[str, dict[str, int]]:
    """Return how many model calls of a live rollout were ``refused``, and how many ``passed`` through, by destination."""
    counts = next((each.elsewhere for each in list(live.values()) if each.address.rollout_id == rollout_id), {})
    return {kind: dict(counts.get(kind, {})) for kind in ("refused", "passed")}


def _check(library: str, method: str, url: str, body: Callable[[], Any], client: str) -> Target | None:
    """Return where a request goes instead, or None if it may leave. Raises CallRefused if neither.

    A rollout's model calls that leave or are refused are counted.
    """
    parts = urlsplit(url)
    call = model_call(method, parts.hostname or "", parts.path, body)
    if call is None or _endpoint(url) in map(_endpoint, list(live)):
        return None
    address = current_rollout.get()
    if address is None and not call.at_provider:
        return None
    where = f"{method} {parts.hostname}{parts.path}"
    if address is not None and address.live and library in _senders and (path := _path_of(parts.path)):
        return Target(f"{address.base_url}{path}", _own_headers() | {RELAY: url}, keeps_keys=True)
    # Of a body that can't be read here, such as a stream, the model may be one that passes through.
    known = call.model is not None or not (address and address.passthrough)
    path, to_do = None, TO_DO
    if known and library in _senders:
        path, to_do = _path_of(parts.path), OTHER_API
    return _check_leaves(address, call.model, where, f"{where} (model {call.model!r}, sent by {client})", path, to_do)


def _check_leaves(
    address: RolloutAddress | None,
    model: str | None,
    where: str,
    what: str,
    path: str | None = None,
    to_do: str = TO_DO,
) -> Target | None:
    try:
        owner = destination(model)
    except CaptureError as error:
        raise CallRefused(str(error)) from error
    if owner is not None and path is not None:
        return Target(f"{owner.base_url}{path}", {"Authorization": f"Bearer {owner.api_key}"} | _own_headers())
    refused = owner is not None
    if address is not None and (rollout := live.get(address.base_url)):
        with lock:
            rollout.elsewhere["refused" if refused else "passed"][where] += 1
    if refused:
        raise CallRefused(
            f"{what} was refused before it left: inside a rollout the policy answers model calls, and this one was not "
            f"redirected; {to_do}"
        )
    return None


def _own_headers() -> dict[str, str]:
    return {"x-art-request-id": uuid.uuid4().hex} | caller_headers()


@functools.lru_cache(1024)
def _endpoint(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _check_httpx(library: str, _transport: Any, request: Any) -> Any:
    module = sys.modules[type(request).__module__.partition(".")[0]]
    try:
        return _check(library, request.method, str(request.url), lambda: _content(request), module.__name__)
    except CallRefused as refusal:
        if "x-stainless-lang" not in request.headers:
            raise
        # The SDKs that send this header take an exception for a lost connection and retry.
        error = {"type": "permission_error", "code": "not_captured", "message": str(refusal)}
        answer = {"type": "error", "error": error}
        return module.Response(403, json=answer, headers={"x-should-retry": "false"}, request=request)


def _content(request: Any) -> Any:
    try:
        return request.content
    except RuntimeError:  # a stream, which can be read only once
        return None


def _check_http(
    library: str, self: Any, method: str, url: str, body: Any = None, *_args: Any, **_kwargs: Any
) -> Target | None:
    """For connections of ``http.client`` and pools of urllib3, which connect before they request."""
    if not url.startswith("http"):  # a whole URL is for a proxy
        scheme = getattr(self, "scheme", None) or ("https" if self.default_port == 443 else "http")
        host = (getattr(self, "_tunnel_host", None) or self.host).strip("[]")
        port = getattr(self, "_tunnel_port", None) or self.port
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}{f':{port}' if port else ''}{url}"
    return _check(library, method, url, lambda: body, type(self).__module__.partition(".")[0])


def _check_aiohttp(library: str, self: Any, method: str, url: Any, **kwargs: Any) -> Target | None:
    body = kwargs.get("json") or kwargs.get("data")
    whole = self._build_url(url).extend_query(kwargs.get("params") or {})
    return _check(library, method, str(whole), lambda: body, "aiohttp")


def _check_tls(position: int) -> Function:
    """Check the host, which is ``server_hostname`` or the argument at ``position``; the model is not known."""

    def check(_library: str, *args: Any, server_hostname: Any = None, **_: Any) -> None:
        host = args[position] if len(args) > position else server_hostname
        address = current_rollout.get()
        if address is not None and isinstance(host, str) and at_provider(host):
            _check_leaves(address, None, host, f"a connection to {host} (by a client with sockets of its own)")

    return check


@contextmanager
def _guarding(check: Function, /, *args: Any, **kwargs: Any) -> Iterator[Any]:
    if not live or exempted.get() or _checked.get():
        yield None
    else:
        answer = check(*args, **kwargs)
        with assigned(_checked, True):
            yield answer


def _guarded(check: Function, library: str = "", *, is_async: bool = False) -> Wrap:
    """Call ``check`` with the library and the arguments first: it raises, or returns a Target, the answer, or None."""

    def wrap_function(send: Function) -> Function:
        @functools.wraps(send)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with _guarding(check, library, *args, **kwargs) as answer:
                if isinstance(answer, Target):
                    return _senders[library](answer, send, *args, **kwargs)
                return send(*args, **kwargs) if answer is None else answer

        @functools.wraps(send)
        async def async_wrapper(*args: Any, **kwargs: Any) -> Any:
            with _guarding(check, library, *args, **kwargs) as answer:
                if isinstance(answer, Target):
                    return await _senders[library](answer, send, *args, **kwargs)
                return await send(*args, **kwargs) if answer is None else answer

        return async_wrapper if is_async else wrapper

    return wrap_function


for module in ("httpx", "httpx2"):
    wrap_while_live(_guarded(_check_httpx, "httpx"), f"{module}:HTTPTransport.handle_request")
    wrap_while_live(_guarded(_check_httpx, "httpx", is_async=True), f"{module}:AsyncHTTPTransport.handle_async_request")
wrap_while_live(_guarded(_check_http, "http"), "http.client:HTTPConnection.request")
wrap_while_live(_guarded(_check_http, "urllib3"), "urllib3.connectionpool:HTTPConnectionPool.urlopen")
wrap_while_live(_guarded(_check_aiohttp, "aiohttp", is_async=True), "aiohttp:ClientSession._request")
wrap_while_live(_guarded(_check_tls(5)), "ssl:SSLContext.wrap_socket")
wrap_while_live(_guarded(_check_tls(4)), "ssl:SSLContext.wrap_bio")
