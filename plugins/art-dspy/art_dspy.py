"""The plugin for DSPy: a program is an agent, and its model calls go to the rollout.

DSPy's client, lm15, sends them with sockets of its own. What DSPy leaves to LiteLLM is redirected by art-openai and art-http.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import json
import re
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from art_core import caller_headers, destination, exempt, hookimpl, name_agents, when_imported
from art_core.types import RolloutAddress, RunAgent
from art_http import path_of
from art_http.clients import KEYS
from art_http.frameworks import is_a

_request_id: ContextVar[str | None] = ContextVar("art_dspy_request_id", default=None)
"""The same for all attempts at one call."""


@hookimpl
def adapt_agent(agent: object) -> RunAgent | None:
    """Run a ``dspy.Module`` with a task as its inputs; the output is the prediction's fields, or the only one's value."""
    if not is_a(agent, "dspy.Module"):
        return None

    async def run(task_input: Any, address: RolloutAddress) -> Any:
        inputs = task_input if isinstance(task_input, dict) else {_only_input(agent): task_input}
        # In a thread if possible, because an async program too may call tools that block.
        in_thread = hasattr(type(agent), "forward")
        output = await (asyncio.to_thread(agent, **inputs) if in_thread else agent.acall(**inputs))
        if not is_a(output, "dspy.Prediction"):
            return output
        fields = dict(output.items())
        return fields if len(fields) > 1 else next(iter(fields.values()), None)

    return run


def _only_input(program: Any) -> str:
    """Return the name of a program's input. Raises ValueError if it has several."""
    # The class's, because DSPy warns about any look at a program's own.
    forward = getattr(type(program), "forward", None) or type(program).aforward
    _, *parameters = inspect.signature(forward).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [each.name for each in parameters if each.default is each.empty and each.kind not in variable]
    if not names:
        signature = getattr(program, "signature", None) or program.predictors()[0].signature
        names = list(signature.input_fields)
    if len(names) != 1:
        raise ValueError(f"{type(program).__name__} has the inputs {', '.join(names)}: a task must be a dict of them")
    return names[0]


@hookimpl
def redirect_clients() -> None:
    """Redirect what lm15 sends, let no cache answer in a rollout, and name the predictor that is calling."""
    _wrap()


@functools.cache
def _wrap() -> None:
    when_imported("dspy", lambda _: name_agents(predictor))
    when_imported("dspy._vendor.lm15.transports._sync", _redirect)
    when_imported("dspy._vendor.lm15.transports._async", _redirect_async)
    when_imported("dspy.clients.execution", _wrap_calls)


def predictor() -> str | None:
    """Return the name of the predictor that is calling in the program that runs, such as ``draft.predict``."""
    *programs, caller = sys.modules["dspy"].settings.caller_modules or [None]
    named = (pair for program in programs for pair in program.named_predictors())
    return next((name for name, predict in named if predict is caller), None)


def _redirect(module: Any) -> None:
    transport = module.StdlibTransport
    stream = transport.stream

    @functools.wraps(stream)
    def redirected(self: Any, request: Any) -> Any:
        with _readdressed(self, request) as sent:
            return stream(*sent)

    transport.stream = redirected


def _redirect_async(module: Any) -> None:
    transport = module.StdlibAsyncTransport
    # What is returned by ``stream`` calls it.
    stream = transport._do_stream

    @functools.wraps(stream)
    async def redirected(self: Any, request: Any) -> Any:
        with _readdressed(self, request) as sent:
            return await stream(*sent)

    transport._do_stream = redirected


@contextlib.contextmanager
def _readdressed(transport: Any, request: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what sends a request, and the request: copies for the rollout's address if it is a rollout's model call."""
    url = request.url.partition("?")[0]
    path = path_of(urlsplit(url).path) if request.method == "POST" else None
    if path is None:
        yield transport, request
        return
    named = re.search(r"/models/([^/]+):", url)
    address = destination(named[1] if named else json.loads(request.body).get("model"), url.removesuffix(path))
    if address is None:
        # A model that passes through, which only looks like one that was missed.
        with exempt():
            yield transport, request
        return
    ours = {"Authorization": f"Bearer {address.api_key}", "x-art-request-id": _request_id.get() or uuid.uuid4().hex}
    headers = [(name, value) for name, value in request.headers if name.lower() not in KEYS]
    headers += (ours | caller_headers()).items()
    # It shares the connections, but a proxy couldn't reach the rollout's address.
    direct = copy.copy(transport)
    direct._proxy, direct._trust_env = None, False
    yield direct, replace(request, url=f"{address.base_url}{path}", headers=headers)


def _wrap_calls(execution: Any) -> None:
    cached, store = execution._cached, execution._store
    execution._cached = lambda lm, *call: None if destination(lm.model) else cached(lm, *call)
    execution._store = lambda lm, *call: None if destination(lm.model) else store(lm, *call)
    execution._attempt = _identified(execution._attempt)
    execution._aattempt = _identified_async(execution._aattempt)


def _identified(attempt: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(attempt)
    def identified(lm: Any, call: Any, *rest: Any) -> None:
        with _identifying(call, rest[-1]):
            attempt(lm, call, *rest)

    return identified


def _identified_async(attempt: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(attempt)
    async def identified(lm: Any, call: Any, *rest: Any) -> None:
        with _identifying(call, rest[-1]):
            await attempt(lm, call, *rest)

    return identified


@contextlib.contextmanager
def _identifying(call: Any, results: list[Any]) -> Iterator[None]:
    # Each of the n answers of a call is asked for by itself, and attempts at it follow one another.
    ids = vars(call).setdefault("_art_request_ids", {})
    token = _request_id.set(ids.setdefault(len(results), uuid.uuid4().hex))
    try:
        yield
    finally:
        _request_id.reset(token)
