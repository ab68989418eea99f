"""Runs LangChain runnables, and refuses model calls that would bypass capture. Knows nothing about HTTP or graphs.

LangChain's OpenAI models ask through the OpenAI client, which art-openai redirects; nothing more is done for them here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from art_core import destination, hookimpl
from art_core.errors import CaptureError

if TYPE_CHECKING:
    from langchain_core.language_models import BaseLanguageModel

    from art_core.types import RolloutAddress, RunAgent

ENTRANCES = ("generate", "agenerate", "stream", "astream", "stream_events", "astream_events")
"""Every call of a model begins in one of these methods."""


@hookimpl
def adapt_agent(agent: object) -> RunAgent | None:
    """Run a runnable with ``ainvoke``; None for anything else."""
    # An object of LangChain's exists only where its module was imported.
    runnables = sys.modules.get("langchain_core.runnables.base")
    if runnables is None or not isinstance(agent, runnables.Runnable):
        return None

    async def run(input: Any, address: RolloutAddress) -> Any:
        return await agent.ainvoke(input)

    return run


@hookimpl
def redirect_clients() -> None:
    """Make model calls that art-openai does not redirect an error inside a rollout."""
    _guard()


@functools.cache
def _guard() -> None:
    from langchain_core.language_models import BaseChatModel, BaseLLM

    for models in (BaseChatModel, BaseLLM):
        for name in ENTRANCES:
            if name in vars(models):
                setattr(models, name, _guarded(vars(models)[name]))


def _guarded(ask: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(ask)
    def guarded(self: BaseLanguageModel, *args: Any, **kwargs: Any) -> Any:
        _check(self)
        return ask(self, *args, **kwargs)

    return guarded


def _check(model: BaseLanguageModel) -> None:
    """Raise CaptureError where a rollout's call would be answered by something else than the policy."""
    kind = type(model)
    name = model._get_ls_params().get("ls_model_name") or kind.__name__
    if destination(name) is None:
        return
    if not _asks_through_openai(kind):
        raise CaptureError(
            f"{kind.__name__} ({name!r}) was called inside a rollout, and its calls cannot be recorded: art-langchain "
            f"captures ChatOpenAI, AzureChatOpenAI and models derived from them. Use ChatOpenAI in the agent, or let this "
            f"model answer for itself with passthrough=[{name!r}]"
        )
    if _cache(model) is not None:
        raise CaptureError(
            f"{kind.__name__} ({name!r}) was called inside a rollout with LangChain's LLM cache on: answers from a cache teach "
            "nothing. Call set_llm_cache(None), or give the model cache=False, while training"
        )


@functools.cache
def _asks_through_openai(model: type) -> bool:
    return any(base.__module__.partition(".")[0] == "langchain_openai" for base in model.__mro__)


def _cache(model: BaseLanguageModel) -> object | None:
    """Return the cache that would be looked into first, or None."""
    from langchain_core.globals import get_llm_cache

    if model.cache is False:
        return None
    return get_llm_cache() if model.cache in (None, True) else model.cache
