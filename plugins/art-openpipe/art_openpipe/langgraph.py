"""``art.langgraph``: rollouts that run LangGraph or LangChain agents. Knows nothing about training."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from art_core.errors import ConfigError
from art_core.types import Call
from art_openpipe.auto import fill
from art_openpipe.model import Model
from art_openpipe.trajectories import Trajectory

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

_asked: ContextVar[tuple[Model, str] | None] = ContextVar("art_openpipe_langgraph", default=None)
"""The model of the rollout that runs here, and its address."""
Rollout = Callable[..., Awaitable[Trajectory]]


def wrap_rollout(model: Model, fn: Rollout | None = None) -> Any:
    """Return ``fn`` with everything that it asks ``model`` in the trajectory that it returns; without ``fn``, a decorator.

    The trajectory is a new one with the rest of what ``fn`` returned. Of a model that is not trained nothing is captured.
    """
    if fn is None:
        return functools.partial(wrap_rollout, model)

    @functools.wraps(fn)
    async def rollout(*args: Any, **kwargs: Any) -> Trajectory:
        if not model.trainable:
            return await _run(fn, model, model.inference_base_url or "", args, kwargs)
        calls: list[Call] = []
        try:
            async with model.backend().opened(model).record.scope(calls) as base_url:
                found = await _run(fn, model, base_url, args, kwargs)
        except Exception as error:
            error.trajectory = partial = Trajectory()  # type: ignore[attr-defined]  # TrajectoryGroup keeps it
            fill(partial, calls)
            raise
        found = found.model_copy()
        fill(found, calls)
        return found

    return rollout


async def _run(fn: Rollout, model: Model, base_url: str, args: Any, kwargs: Any) -> Trajectory:
    token = _asked.set((model, base_url))
    try:
        found = await fn(*args, **kwargs)
    finally:
        _asked.reset(token)
    if not isinstance(found, Trajectory):
        raise TypeError(
            f"the wrapped rollout {getattr(fn, '__name__', fn)!r} returned {type(found).__name__}; return an art.Trajectory "
            "(with the reward): its messages are filled in"
        )
    return found


def init_chat_model(
    model: str | None = None,
    *,
    model_provider: str | None = None,
    configurable_fields: Any = None,
    config_prefix: str | None = None,
    **kwargs: Any,
) -> ChatOpenAI:
    """Return LangChain's ``ChatOpenAI``, answered by the model of the rollout that this runs in; ``kwargs`` are its settings.

    It is the whole class: tools, structured output, streams and settings work as they do elsewhere. ``model`` and
    ``model_provider`` say what the script uses elsewhere, and count for nothing here.
    """
    if configurable_fields is not None or config_prefix is not None:
        raise ConfigError(
            "init_chat_model: configurable_fields and config_prefix are not there with art; leave them out"
        )
    asked = _asked.get()
    if asked is None:
        raise ConfigError(
            "init_chat_model() was called outside a wrapped rollout, so no model is known: call it inside the function that "
            "art.langgraph.wrap_rollout(model, fn) wraps"
        )
    from langchain_openai import ChatOpenAI

    answering, base_url = asked
    return ChatOpenAI(
        model=answering.get_inference_name(),
        base_url=base_url,
        api_key=answering.inference_api_key or "unused",
        **kwargs,
    )
