"""``art.langgraph``: rollouts that run LangGraph or LangChain agents."""

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

_current: ContextVar[tuple[Model, str] | None] = ContextVar("art_openpipe_langgraph", default=None)
"""The model of the current rollout, and its address."""
Rollout = Callable[..., Awaitable[Trajectory]]


def wrap_rollout(model: Model, fn: Rollout | None = None) -> Any:
    """Wrap ``fn`` so that its calls to ``model`` are added to the trajectory that it returns; without ``fn``, a decorator.

    The result is a copy of the trajectory that ``fn`` returned. Nothing is captured if the model is not trainable.
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
                trajectory = await _run(fn, model, base_url, args, kwargs)
        except Exception as error:
            error.trajectory = partial = Trajectory()  # type: ignore[attr-defined]  # TrajectoryGroup keeps it
            fill(partial, calls)
            raise
        trajectory = trajectory.model_copy()
        fill(trajectory, calls)
        return trajectory

    return rollout


async def _run(fn: Rollout, model: Model, base_url: str, args: Any, kwargs: Any) -> Trajectory:
    token = _current.set((model, base_url))
    try:
        result = await fn(*args, **kwargs)
    finally:
        _current.reset(token)
    if not isinstance(result, Trajectory):
        raise TypeError(
            f"the wrapped rollout {getattr(fn, '__name__', fn)!r} returned {type(result).__name__}; return an art.Trajectory "
            "with the reward, and its messages are added"
        )
    return result


def init_chat_model(
    model: str | None = None,
    *,
    model_provider: str | None = None,
    configurable_fields: Any = None,
    config_prefix: str | None = None,
    **kwargs: Any,
) -> ChatOpenAI:
    """Return a LangChain ``ChatOpenAI`` that calls the current rollout's model; ``kwargs`` are its settings.

    Tools, structured output, streaming and settings work as usual. ``model`` and ``model_provider``, which scripts use outside
    rollouts, are ignored.
    """
    if configurable_fields is not None or config_prefix is not None:
        raise ConfigError(
            "init_chat_model: configurable_fields and config_prefix are not supported by art; remove them"
        )
    current = _current.get()
    if current is None:
        raise ConfigError(
            "init_chat_model() was called outside a wrapped rollout, so its model is unknown; call it inside the function that "
            "art.langgraph.wrap_rollout(model, fn) wraps"
        )
    from langchain_openai import ChatOpenAI

    rollout_model, base_url = current
    return ChatOpenAI(
        model=rollout_model.get_inference_name(),
        base_url=base_url,
        api_key=rollout_model.inference_api_key or "unused",
        **kwargs,
    )
