"""A chat completion from a server with OpenAI's API, through LiteLLM's HTTP client. Knows nothing about what is asked.

LiteLLM says where the server is, with which key, and what an error means. What is left out is its translation between APIs:
there is nothing to translate, and it takes three times the CPU of the request itself (docs/benchmarks.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from art_core.redaction import without_keys
from art_core.types import JsonDict
from art_ruler.judge import Answer, JudgeError

__all__ = ["OpenAIServer", "counted", "known_as", "openai_server", "price_of"]

AS_THEY_ARE = frozenset({"temperature", "top_p", "seed", "max_completion_tokens", "reasoning_effort"})
"""Parameters that OpenAI's API takes under LiteLLM's names. With any other, LiteLLM translates: ``max_tokens``, which not
every model takes, too."""
LISTENERS = ("callbacks", "input_callback", "success_callback", "failure_callback", "cache", "headers", "organization")
"""Settings of LiteLLM's by which others see or change its calls: where one is set, the calls are LiteLLM's own."""


class OpenAIServer:
    """Where to ask a model, and with which key."""

    def __init__(self, litellm: ModuleType, model: str, base: str, key: str, params: JsonDict, timeout: float) -> None:
        self._litellm, self._model, self._timeout = litellm, model, timeout
        self._url = f"{base.rstrip('/')}/chat/completions"
        self._key = key
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._params = params

    def heard(self) -> bool:
        """Whether somebody listens to LiteLLM's calls."""
        return any(getattr(self._litellm, name, None) for name in LISTENERS)

    async def complete(self, messages: list[JsonDict], response_format: JsonDict) -> Answer:
        """Return the answer. Raises LiteLLM's errors, and JudgeError for what is no chat completion."""
        from litellm.llms.custom_httpx.http_handler import get_async_httpx_client

        shape = {"response_format": response_format} if response_format else {}
        data = json.dumps({"model": self._model, "messages": messages, **shape, **self._params})
        try:
            client = get_async_httpx_client(llm_provider=self._litellm.LlmProviders.OPENAI)
            response = await client.post(self._url, data=data, headers=self._headers, timeout=self._timeout)
        except Exception as error:  # the boundary to the HTTP client: LiteLLM gives its errors their names
            raise self._named(error) from error
        return self._answer(response.text)

    def _named(self, error: Exception) -> Exception:
        try:
            return self._litellm.exception_type(
                model=self._model, original_exception=error, custom_llm_provider="openai"
            )
        except Exception as named:  # noqa: BLE001  it raises what it finds
            return named

    def _answer(self, text: str) -> Answer:
        try:
            body = json.loads(text)
            choice, usage = body["choices"][0], body.get("usage") or {}
            said, reason = choice["message"].get("content") or "", choice.get("finish_reason")
            counts = counted(usage.get("prompt_tokens"), usage.get("completion_tokens"))
            if not isinstance(said, str) or not isinstance(reason, str | None):
                raise TypeError
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            said = without_keys(text, self._key)[:200]
            what = without_keys(f"{self._url} answered something that is no chat completion: {said!r}")
            raise JudgeError(what) from error
        cost = None if counts[0] is None else price_of(self._litellm, self._model, *counts)
        return Answer(said, *counts, cost, None if reason == "stop" else reason)


def counted(asked: Any, said: Any) -> tuple[int, int] | tuple[None, None]:
    """Return the numbers of tokens; None where the server did not count, for which LiteLLM says 0."""
    known = all(type(it) is int and it >= 0 for it in (asked, said)) and asked > 0
    return (asked, said) if known else (None, None)


def price_of(litellm: ModuleType, model: str, asked: int, said: int) -> float | None:
    """Return US dollars for so many tokens; None where LiteLLM does not know the model."""
    known = known_as(litellm, model)
    if known is None:
        return None
    return sum(litellm.cost_per_token(model=known, prompt_tokens=asked, completion_tokens=said))


def known_as(litellm: ModuleType, model: str) -> str | None:
    """Return the name under which LiteLLM's table has a model; None where it has not."""
    return next((it for it in (model, model.partition("/")[2]) if it in litellm.model_cost), None)


def openai_server(
    litellm: ModuleType, found: tuple[str, str, str | None, str | None], params: Mapping[str, Any], timeout: float
) -> OpenAIServer | None:
    """Return where a model is asked directly; None where LiteLLM has something to translate.

    ``found`` is what its ``get_llm_provider`` says of the model.
    """
    base, key = params.get("api_base"), params.get("api_key")
    model, provider, _, _ = found
    plain = {name: value for name, value in params.items() if name not in ("api_base", "api_key")}
    chat = litellm.model_cost.get(model, {}).get("mode", "chat") == "chat"
    if provider != "openai" or not chat or not plain.keys() <= AS_THEY_ARE:
        return None
    base, key = litellm.OpenAIGPTConfig.get_api_base(base), litellm.OpenAIGPTConfig.get_api_key(key)
    return OpenAIServer(litellm, model, base, key, plain, timeout) if key else None
