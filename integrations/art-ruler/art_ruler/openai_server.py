"""Requests chat completions from a server with OpenAI's API, through LiteLLM's HTTP client.

LiteLLM provides the server's address and key, and maps errors. Its translation between APIs is bypassed: there is nothing to
translate, and it takes three times the CPU of the request itself (docs/benchmarks.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import httpx

from art_core.plugin_api import without_keys
from art_core.types import JsonDict
from art_ruler.judge import Answer, JudgeError

__all__ = ["OpenAIServer", "counted", "known_as", "openai_server", "price_of"]

AS_THEY_ARE = frozenset({"temperature", "top_p", "seed", "max_completion_tokens", "reasoning_effort"})
"""Parameters that OpenAI's API accepts under LiteLLM's names. All others need LiteLLM's translation, even ``max_tokens``, which
some models reject."""
LISTENERS = ("callbacks", "input_callback", "success_callback", "failure_callback", "cache", "headers", "organization")
"""LiteLLM settings through which others observe or change its calls; if one is set, LiteLLM itself makes the calls."""


class OpenAIServer:
    """A model on a server with OpenAI's API."""

    def __init__(
        self, litellm: ModuleType, model: str, base: str, key: str, params: JsonDict, timeout: httpx.Timeout
    ) -> None:
        self._litellm, self._model, self._timeout = litellm, model, timeout
        self._url = f"{base.rstrip('/')}/chat/completions"
        self._key = key
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._params = params

    def has_listeners(self) -> bool:
        """Whether others observe or change LiteLLM's calls."""
        return any(getattr(self._litellm, name, None) for name in LISTENERS)

    async def complete(self, messages: list[JsonDict], response_format: JsonDict) -> Answer:
        """Return the answer. Raises LiteLLM's errors, and JudgeError if the response is not a chat completion."""
        from litellm.llms.custom_httpx.http_handler import get_async_httpx_client

        shape = {"response_format": response_format} if response_format else {}
        data = json.dumps({"model": self._model, "messages": messages, **shape, **self._params})
        try:
            client = get_async_httpx_client(llm_provider=self._litellm.LlmProviders.OPENAI)
            response = await client.post(self._url, data=data, headers=self._headers, timeout=self._timeout)
        except Exception as error:  # whatever the HTTP client raises, LiteLLM maps to its own errors
            raise self._mapped(error) from error
        return self._answer(response.text)

    def _mapped(self, error: Exception) -> Exception:
        try:
            return self._litellm.exception_type(
                model=self._model, original_exception=error, custom_llm_provider="openai"
            )
        except Exception as mapped:  # noqa: BLE001  LiteLLM raises the mapped error
            return mapped

    def _answer(self, text: str) -> Answer:
        try:
            body = json.loads(text)
            choice, usage = body["choices"][0], body.get("usage") or {}
            content, reason = choice["message"].get("content") or "", choice.get("finish_reason")
            counts = counted(usage.get("prompt_tokens"), usage.get("completion_tokens"))
            if not isinstance(content, str) or not isinstance(reason, str | None):
                raise TypeError
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            excerpt = without_keys(text, self._key)[:200]
            message = without_keys(f"the response from {self._url} is not a chat completion: {excerpt!r}")
            raise JudgeError(message) from error
        cost = None if counts[0] is None else price_of(self._litellm, self._model, *counts)
        return Answer(content, *counts, cost, None if reason == "stop" else reason)


def counted(input_tokens: Any, output_tokens: Any) -> tuple[int, int] | tuple[None, None]:
    """Return the token counts; (None, None) if the server did not report them (LiteLLM then says 0)."""
    known = all(type(count) is int and count >= 0 for count in (input_tokens, output_tokens)) and input_tokens > 0
    return (input_tokens, output_tokens) if known else (None, None)


def price_of(litellm: ModuleType, model: str, input_tokens: int, output_tokens: int) -> float | None:
    """Return the price in US dollars; None if LiteLLM does not know the model."""
    known = known_as(litellm, model)
    if known is None:
        return None
    return sum(litellm.cost_per_token(model=known, prompt_tokens=input_tokens, completion_tokens=output_tokens))


def known_as(litellm: ModuleType, model: str) -> str | None:
    """Return the model's name in LiteLLM's table; None if it is not listed."""
    return next((name for name in (model, model.partition("/")[2]) if name in litellm.model_cost), None)


def openai_server(
    litellm: ModuleType,
    provider_info: tuple[str, str, str | None, str | None],
    params: Mapping[str, Any],
    timeout: httpx.Timeout,
) -> OpenAIServer | None:
    """Return the server for a model that needs none of LiteLLM's translation; None for any other.

    ``provider_info`` is what LiteLLM's ``get_llm_provider`` returns for the model.
    """
    base, key = params.get("api_base"), params.get("api_key")
    model, provider, _, _ = provider_info
    plain = {name: value for name, value in params.items() if name not in ("api_base", "api_key")}
    chat = litellm.model_cost.get(model, {}).get("mode", "chat") == "chat"
    if provider != "openai" or not chat or not plain.keys() <= AS_THEY_ARE:
        return None
    base, key = litellm.OpenAIGPTConfig.get_api_base(base), litellm.OpenAIGPTConfig.get_api_key(key)
    return OpenAIServer(litellm, model, base, key, plain, timeout) if key else None
