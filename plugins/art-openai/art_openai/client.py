"""Redirects the OpenAI client's model calls to the current rollout.

Every call of every client, sync or async, streamed, raw or parsed, goes through ``client.request(cast_to, options)``, looked up
on the instance; that one method is wrapped. Inside a rollout the call is made by a client of our own, because the agent's may
have a base URL, a token refresh, proxies or an Azure deployment that do not apply to the rollout's address.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import functools
import importlib.util
import os
import ssl
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from art_core import caller_headers, destination, when_imported
from art_core.errors import CaptureError

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

    from art_core.types import RolloutAddress

GATEWAY = "in the checkout of art, run: pip install -e integrations/art-gateway"
RECORDED = ("/chat/completions", "/responses", "/responses/input_tokens", "/completions")
"""Endings of the paths that a rollout's address answers; all but the first need art-gateway, which translates them."""
TEXT_PATHS = (*RECORDED, "/responses/compact", "/decisions", "/runs", "/agents/sessions")
"""Endings of the paths that make a model generate text (``/threads/.../runs`` belongs to Assistants)."""


@functools.cache
def wrap() -> None:
    """Wrap the OpenAI library's clients when it is imported."""
    when_imported("openai", _wrap_clients)
    for module in ("openai.resources.responses", "openai.resources.beta.responses"):
        when_imported(module, _refuse_connections)


def _wrap_clients(openai: Any) -> None:
    openai.OpenAI.request = _redirected(openai.OpenAI.request)
    openai.AsyncOpenAI.request = _redirected_async(openai.AsyncOpenAI.request)


def _refuse_connections(resources: Any) -> None:
    for resource in (resources.Responses, resources.AsyncResponses):
        if "connect" in vars(resource):  # added during 2.x
            resource.connect = _refused(resource.connect)


def _redirected(request: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(request)
    def redirected(self: OpenAI, cast_to: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        target = _target(self, options)
        if target is None:
            return request(self, cast_to, options, *args, **kwargs)
        return request(_client(), cast_to, _readdressed(self, options, *target), *args, **kwargs)

    return redirected


def _redirected_async(request: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(request)
    async def redirected(self: AsyncOpenAI, cast_to: Any, options: Any, *args: Any, **kwargs: Any) -> Any:
        target = _target(self, options)
        if target is None:
            return await request(self, cast_to, options, *args, **kwargs)
        client = await _async_client()
        return await request(client, cast_to, _readdressed(self, options, *target), *args, **kwargs)

    return redirected


def _refused(connect: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(connect)
    def refused(*args: Any, **kwargs: Any) -> Any:
        if destination(None) is not None:
            raise CaptureError(
                "responses.connect() was called inside a rollout, but a Responses WebSocket cannot be recorded; use "
                "chat.completions in the agent"
            )
        return connect(*args, **kwargs)

    return refused


def _target(client: OpenAI | AsyncOpenAI, options: Any) -> tuple[RolloutAddress, str] | None:
    """Return the rollout, and the path below its address, to redirect this request to; None to leave it alone."""
    path = options.url.partition("?")[0].rstrip("/")
    if options.method.lower() != "post" or not path.endswith(TEXT_PATHS):
        return None
    model = options.json_data.get("model") if isinstance(options.json_data, dict) else None
    address = destination(model, str(client.base_url))
    if address is None:
        return None
    recorded = next((ending for ending in RECORDED if path.endswith(ending)), None)
    if recorded == RECORDED[0] or (recorded and _gateway()):
        return address, recorded
    advice = GATEWAY if recorded else "use chat.completions in the agent"
    raise CaptureError(
        f"the agent called POST {path} inside a rollout, which art-openai cannot record: {advice}, or exempt this model with "
        f"passthrough=[{model!r}]"
    )


@functools.cache
def _gateway() -> bool:
    """Whether art-gateway is installed, with which a rollout's address answers more than chat completions."""
    return importlib.util.find_spec("art_gateway") is not None


def _readdressed(client: OpenAI | AsyncOpenAI, options: Any, address: RolloutAddress, path: str) -> Any:
    """Return a copy of ``options`` that is sent to ``address``, with the settings of the agent's ``client``."""
    from openai import NotGiven

    ours = {"Authorization": f"Bearer {address.api_key}", "x-art-request-id": uuid.uuid4().hex} | caller_headers()
    options = copy.copy(options)
    options.url = f"{address.base_url}{path}"
    options.headers = {k: v for k, v in (options.headers or {}).items() if k.lower() != "authorization"} | ours
    if isinstance(options.timeout, NotGiven):
        options.timeout = client.timeout
    if isinstance(options.max_retries, NotGiven):
        options.max_retries = client.max_retries
    return options


_async_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[AsyncOpenAI, AsyncIterator[AsyncOpenAI]]] = (
    WeakKeyDictionary()
)
_lock = threading.Lock()


async def _async_client() -> AsyncOpenAI:
    """Return the client of the running event loop; loops cannot share connections."""
    loop = asyncio.get_running_loop()
    entry = _async_clients.get(loop)
    # A loop may continue after its async generators are shut down, as in Runner.run_sync.
    if entry is None or entry[0].is_closed():
        lifetime = _async_client_of_loop()
        entry = (await anext(lifetime), lifetime)  # does not suspend, so no other task of this loop can interfere
        with _lock:
            for closed in [other for other in _async_clients if other.is_closed()]:
                del _async_clients[closed]
            _async_clients[loop] = entry
    return entry[0]


async def _async_client_of_loop() -> AsyncIterator[AsyncOpenAI]:
    # An async generator: the loop closes it on shutdown, and with it the connections.
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    async with AsyncOpenAI(**_settings(), http_client=DefaultAsyncHttpxClient(**_pool())) as client:
        yield client


@functools.cache
def _client() -> OpenAI:
    from openai import DefaultHttpxClient, OpenAI

    client = OpenAI(**_settings(), http_client=DefaultHttpxClient(**_pool()))
    atexit.register(client.close)
    return client


# A forked child must not send on its parent's connections.
os.register_at_fork(after_in_child=lambda: (_client.cache_clear(), _async_clients.clear()))


def _settings() -> dict[str, Any]:
    from openai import Omit

    # The library reads these from the environment, for its provider.
    lines = os.environ.get("OPENAI_CUSTOM_HEADERS", "").split("\n")
    names = {
        "OpenAI-Organization",
        "OpenAI-Project",
        *(line.partition(":")[0].strip() for line in lines if ":" in line),
    }
    return {
        "api_key": "set-per-call",
        "base_url": "http://set-per-call",
        "default_headers": {name: Omit() for name in names},
    }


def _pool() -> dict[str, Any]:
    # Loading the certificates takes tens of milliseconds, so all pools share them; rollout addresses are not behind a proxy.
    return {"trust_env": False, "verify": _certificates()}


@functools.cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
