"""Runs agents of the OpenAI Agents SDK, names the agent that is calling, and refuses models that bypass capture.

The SDK calls models through the OpenAI client, which ``client.py`` redirects. This module never imports the SDK: if the user has
not imported it, there are no agents to run.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from art_core import destination, when_imported
from art_core.errors import CaptureError
from art_core.plugin_api import on_redirect

if TYPE_CHECKING:
    from agents import Model

    from art_core.types import RolloutAddress, RunAgent


def _sdk() -> ModuleType | None:
    # Many projects have their own package named "agents".
    return sys.modules["agents"] if "agents.tracing.span_data" in sys.modules else None


def adapt(agent: object) -> RunAgent | None:
    """Return the function that runs ``agent`` with ``Runner.run``, or None if it is not an ``agents.Agent``."""
    sdk = _sdk()
    if sdk is None or not isinstance(agent, sdk.Agent):
        return None
    watch_models()
    # The SDK uploads traces to OpenAI; thousands of training rollouts don't belong there.
    config = sdk.RunConfig(tracing_disabled=True)

    async def run(input: Any, address: RolloutAddress) -> Any:
        return (await sdk.Runner.run(agent, input, run_config=config)).final_output

    return run


def calling_agent() -> str | None:
    """Return the name of the agent whose turn it is; None outside the SDK's runs."""
    sdk = _sdk()
    if sdk is None:
        return None
    span = sdk.get_current_span()
    # With tracing disabled, spans are not recorded but nest the same way.
    while span is not None and not isinstance(span.span_data, sdk.AgentSpanData):
        token = getattr(span, "_prev_span_token", None)
        outer = token.old_value if token else None
        span = outer if isinstance(outer, sdk.Span) else None
    return span.span_data.name if span else None


@functools.cache
def watch() -> None:
    """Watch the SDK's models when it is imported."""
    when_imported("agents", lambda _: watch_models())


def watch_models() -> None:
    """Inside a rollout, raise an error if a model answers without a call that was redirected."""
    sdk = _sdk()
    if sdk is not None:
        _watch_all(sdk.Model)


@functools.cache
def _watch_all(interface: type[Model]) -> None:
    for model in _subclasses(interface):
        _watch(model)
    original = vars(interface).get("__init_subclass__")

    def watching(cls: type[Model], **kwargs: Any) -> None:
        if original is None:  # the class may have mixins or be generic, so continue along its MRO
            super(interface, cls).__init_subclass__(**kwargs)
        else:
            original.__func__(cls, **kwargs)
        _watch(cls)

    interface.__init_subclass__ = classmethod(watching)


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _watch(model: type[Model]) -> None:
    for name, watched in (("get_response", _watched), ("stream_response", _watched_stream)):
        if inspect.isfunction(vars(model).get(name)):
            setattr(model, name, watched(vars(model)[name]))


def _watched(ask: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(ask)
    async def watched(self: Model, *args: Any, **kwargs: Any) -> Any:
        if _passes(self):
            return await ask(self, *args, **kwargs)
        calls: list[None] = []
        with _counting(calls):
            answer = await ask(self, *args, **kwargs)
        _check(self, calls)
        return answer

    return watched


def _watched_stream(ask: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    @functools.wraps(ask)
    async def watched(self: Model, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        events, calls, passes = ask(self, *args, **kwargs), [], _passes(self)
        try:
            while True:
                # Per step, because an async generator runs in the context of its consumer.
                with _counting(calls):
                    event = await anext(events, None)
                if event is None:
                    break
                yield event
        finally:
            if inspect.isasyncgen(events):
                await events.aclose()
        if not passes:
            _check(self, calls)

    return watched


@contextmanager
def _counting(calls: list[None]) -> Iterator[None]:
    """Append an element to ``calls`` for each call in this block that is redirected to a rollout, whichever plugin does it."""
    token = on_redirect.set((*on_redirect.get(), lambda: calls.append(None)))
    try:
        yield
    finally:
        on_redirect.reset(token)


def _name(model: Model) -> str:
    return str(getattr(model, "model", None) or type(model).__name__)


def _passes(model: Model) -> bool:
    return destination(_name(model)) is None


def _check(model: Model, calls: list[None]) -> None:
    if not calls:
        name = _name(model)
        raise CaptureError(
            f"{type(model).__name__} ({name!r}) answered inside a rollout without a call that was recorded: art-openai records "
            "the OpenAI client's HTTP requests, art-http those of other clients. Use OpenAIChatCompletionsModel in the agent, or "
            f"exempt this model with passthrough=[{name!r}]"
        )
