"""``art.langgraph``: rollouts that run LangGraph or LangChain agents."""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

from art_core.errors import ConfigError
from art_openpipe.model import Model
from art_openpipe.trajectories import Trajectory

_current: ContextVar[Model | None] = ContextVar("art_openpipe_langgraph", default=None)  # the rollout's


def wrap_rollout(model: Model, fn: Any) -> Any:
    """Wrap ``fn`` so that a copy of the trajectory that it returns has its calls as exchanges."""

    @functools.wraps(fn)
    async def rollout(*args: Any, **kwargs: Any) -> Trajectory:
        token = _current.set(model)
        try:
            with Trajectory() as captured:
                result = await fn(*args, **kwargs)
        finally:
            _current.reset(token)
        if not isinstance(result, Trajectory):
            raise TypeError(
                f"a wrapped rollout returned {type(result).__name__}, not an art.Trajectory with the reward"
            )
        built = {"messages_and_choices": [], "tools": None, "additional_histories": []}
        return result.model_copy(update={"exchanges": captured.exchanges, **built} if captured.exchanges else {})

    return rollout


def init_chat_model(
    model: str | None = None,
    *,
    model_provider: str | None = None,
    invoke_timeout: float | None = 600.0,
    **settings: Any,
) -> Any:
    """Return a LangChain ``ChatOpenAI`` with these settings that calls the current rollout's model."""
    current = _current.get()
    if current is None:
        raise ConfigError(
            "init_chat_model() was called outside a function that art.langgraph.wrap_rollout(model, fn) wraps"
        )
    name = current.get_inference_name()
    if model not in (None, name) or model_provider not in (None, "openai"):
        other = f"{model!r} of {model_provider!r}"
        raise ConfigError(
            f"init_chat_model: {other} is not the rollout's model, {name!r}; use LangChain's own for others"
        )
    for option in settings.keys() & {"configurable_fields", "config_prefix"}:
        raise ConfigError(f"init_chat_model: {option} is not supported by art; remove it")
    from langchain_openai import ChatOpenAI

    address = {"base_url": current.inference_base_url, "api_key": current.inference_api_key or "unused"}
    return ChatOpenAI(model=name, **address, **{"timeout": invoke_timeout, "temperature": 1.0, **settings})
