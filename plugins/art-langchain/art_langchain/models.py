"""Which model answers: inside a rollout the policy, whatever the class of the chat model. Knows nothing about formats.

LangChain's OpenAI models ask through the OpenAI client, which art-openai redirects; they are left alone. Every other chat
model is replaced where it would ask its provider, in ``_generate``, ``_stream`` and the like, and there only: callbacks, tags,
rate limiter and configuration stay the model's own. A ``ChatOpenAI`` of ours asks instead of it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from art_core import destination, when_imported
from art_core.errors import CaptureError
from art_langchain.translation import for_openai, messages_for_openai

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel, BaseLanguageModel
    from langchain_core.messages import BaseMessage
    from langchain_openai import ChatOpenAI

ENTRANCES = ("generate", "agenerate", "stream", "astream", "stream_events", "astream_events")
"""Every call of a model begins in one of these methods."""
EVENTS = {"_stream_chat_model_events": "_stream", "_astream_chat_model_events": "_astream"}
"""Methods that a class may have to stream protocol events itself, and what they are made from."""
ANSWERS = ("_generate", "_agenerate", "_stream", "_astream", *EVENTS)
"""In these methods a class asks its provider."""

_redirected: set[type] = set()
_lock = threading.Lock()


@functools.cache
def redirect() -> None:
    """Wrap the entrances of all models, where and when they are imported; the classes that are used inside a rollout follow
    at their first call."""
    when_imported("langchain_core.language_models.chat_models", lambda module: _wrap(module.BaseChatModel))
    when_imported("langchain_core.language_models.llms", lambda module: _wrap(module.BaseLLM))


def _wrap(models: type) -> None:
    for name in ENTRANCES:
        if name in vars(models):
            setattr(models, name, _entered(vars(models)[name]))


def _entered(ask: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(ask)
    def entered(self: BaseLanguageModel, *args: Any, **kwargs: Any) -> Any:
        _prepare(self, model_name(self, kwargs))
        return ask(self, *args, **kwargs)

    return entered


def _prepare(model: BaseLanguageModel, name: str) -> None:
    """Make sure that the policy answers this call. Raises CaptureError where something else would."""
    # OpenAI's models have an address of their own, which may be a rollout's.
    if destination(name, getattr(model, "openai_api_base", None)) is None:
        return
    from langchain_core.language_models import BaseChatModel

    kind = type(model)
    if not asks_through_openai(kind):
        if not isinstance(model, BaseChatModel):
            raise CaptureError(
                f"{kind.__name__} ({name!r}) was called inside a rollout: it completes plain text, and without a chat's "
                "messages its calls cannot be recorded. Use a chat model in the agent, or let this model answer for itself "
                f"with passthrough=[{name!r}]"
            )
        _redirect_class(kind)
    if _cache(model) is not None:
        raise CaptureError(
            f"{kind.__name__} ({name!r}) was called inside a rollout with LangChain's LLM cache on: answers from a cache teach "
            "nothing. Call set_llm_cache(None), or give the model cache=False, while training"
        )


def _redirect_class(kind: type) -> None:
    from langchain_core.language_models import BaseChatModel

    with _lock:
        for owner in kind.__mro__:
            if owner in _redirected:
                continue
            _redirected.add(owner)
            for name in ANSWERS:
                ask = vars(owner).get(name)
                # The base class's ``_stream`` only says that there is none, and must go on saying so.
                if ask is not None and not (name == "_stream" and owner is BaseChatModel):
                    setattr(owner, name, _answered(name, ask))


def _answered(name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
    # What is called is handed back, so this fits coroutines and generators, too.
    @functools.wraps(ask)
    def answered(self: BaseChatModel, *args: Any, **kwargs: Any) -> Any:
        if asks_through_openai(type(self)) or destination(model_name(self, kwargs)) is None:
            return ask(self, *args, **kwargs)
        return _ask_policy(self, name, *args, **kwargs)

    return answered


def _ask_policy(
    model: BaseChatModel,
    name: str,
    /,
    messages: list[BaseMessage],
    stop: list[str] | None = None,
    run_manager: Any = None,
    **kwargs: Any,
) -> Any:
    """Ask with ``ChatOpenAI``, whose requests art-openai sends to the rollout's address."""
    settings = for_openai(model, stop, kwargs) | {"model": model_name(model, kwargs)}
    ask = getattr(_policy(), EVENTS.get(name, name))
    answer = ask(messages_for_openai(model, messages), run_manager=run_manager, **settings)
    if name not in EVENTS:
        return answer
    from langchain_core.language_models import _compat_bridge  # what BaseChatModel does for classes without events

    return (_compat_bridge.achunks_to_events if name.startswith("_a") else _compat_bridge.chunks_to_events)(answer)


@functools.cache
def _policy() -> ChatOpenAI:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model="policy",
        api_key="set-per-call",
        base_url="http://set-per-call",
        use_responses_api=False,
        stream_usage=True,
        # A stream may wait for as long as a weight swap takes.
        **({"stream_chunk_timeout": None} if "stream_chunk_timeout" in ChatOpenAI.model_fields else {}),
    )


def model_name(model: BaseLanguageModel, kwargs: dict[str, Any]) -> str:
    """Return what ``passthrough=`` calls the model: the provider's name for it, or its class's where it has none."""
    named = kwargs.get("model")
    if isinstance(named, str):
        return named
    return model._get_ls_params().get("ls_model_name") or type(model).__name__


@functools.cache
def asks_through_openai(model: type) -> bool:
    """Tell whether a class is one of LangChain's OpenAI models."""
    return any(base.__module__.partition(".")[0] == "langchain_openai" for base in model.__mro__)


def _cache(model: BaseLanguageModel) -> object | None:
    """Return the cache that would be looked into first, or None."""
    from langchain_core.globals import get_llm_cache

    if model.cache is False:
        return None
    return get_llm_cache() if model.cache in (None, True) else model.cache
