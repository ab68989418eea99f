"""Has the policy answer inside a rollout, whatever the class of the chat model.

LangChain's OpenAI models use the OpenAI client, which art-openai redirects; they are left alone. Every other chat model is
replaced by a ``ChatOpenAI`` of our own, but only where it calls its provider, in ``_generate``, ``_stream`` and the like;
callbacks, tags, rate limiter and configuration remain the model's.
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
"""Every call of a model starts in one of these methods."""
EVENTS = {"_stream_chat_model_events": "_stream", "_astream_chat_model_events": "_astream"}
"""Optional methods of a class that stream protocol events -> the method that streams the same as chunks."""
ANSWERS = ("_generate", "_agenerate", "_stream", "_astream", *EVENTS)
"""The methods in which a class calls its provider."""

_redirected: set[type] = set()
_lock = threading.Lock()


@functools.cache
def redirect() -> None:
    """Wrap the entry points of all models when LangChain is imported; a model class follows at its first call in a rollout."""
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
    """Make sure that the policy answers this call. Raises CaptureError if something else would."""
    # An OpenAI model has its own address, which may be a rollout's.
    if destination(name, getattr(model, "openai_api_base", None)) is None:
        return
    from langchain_core.language_models import BaseChatModel

    kind = type(model)
    if not asks_through_openai(kind):
        if not isinstance(model, BaseChatModel):
            raise CaptureError(
                f"{kind.__name__} ({name!r}) was called inside a rollout, but it completes plain text, and only calls with chat "
                f"messages can be recorded. Use a chat model in the agent, or exempt this model with passthrough=[{name!r}]"
            )
        _redirect_class(kind)
    if _cache(model) is not None:
        raise CaptureError(
            f"{kind.__name__} ({name!r}) was called inside a rollout with LangChain's LLM cache enabled, but nothing can be "
            "learnt from cached answers. Call set_llm_cache(None), or pass cache=False to the model, for training"
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
                # The base class's ``_stream`` signals that a model can't stream, so it must stay.
                if ask is not None and not (name == "_stream" and owner is BaseChatModel):
                    setattr(owner, name, _answered(name, ask))


def _answered(name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
    # Returns the call's result as is, so this works for coroutines and generators too.
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
    """Call ``ChatOpenAI``, whose requests art-openai redirects to the rollout's address."""
    settings = for_openai(model, stop, kwargs) | {"model": model_name(model, kwargs)}
    ask = getattr(_policy(), EVENTS.get(name, name))
    answer = ask(messages_for_openai(model, messages), run_manager=run_manager, **settings)
    if name not in EVENTS:
        return answer
    from langchain_core.language_models import _compat_bridge  # as BaseChatModel does for classes without events

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
        # A stream may pause while new weights are loaded.
        **({"stream_chunk_timeout": None} if "stream_chunk_timeout" in ChatOpenAI.model_fields else {}),
    )


def model_name(model: BaseLanguageModel, kwargs: dict[str, Any]) -> str:
    """Return the name of the model in ``passthrough=``: the provider's name for it, or else the class name."""
    name = kwargs.get("model")
    if isinstance(name, str):
        return name
    return model._get_ls_params().get("ls_model_name") or type(model).__name__


@functools.cache
def asks_through_openai(model: type) -> bool:
    """Return whether the class is one of LangChain's OpenAI models."""
    return any(base.__module__.partition(".")[0] == "langchain_openai" for base in model.__mro__)


def _cache(model: BaseLanguageModel) -> object | None:
    """Return the cache that the model would use, or None."""
    from langchain_core.globals import get_llm_cache

    if model.cache is False:
        return None
    return get_llm_cache() if model.cache in (None, True) else model.cache
