"""Any model that LiteLLM supports, as a judge.

LiteLLM takes seconds to import, so it is imported in a thread before the first question.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import httpx
import tenacity

from art_core.errors import ConfigError
from art_core.plugin_api import printable, without_keys
from art_core.types import JsonDict
from art_ruler.answer import SCHEMA
from art_ruler.judge import Answer, JudgeError, TimedOut, TooLong, with_tokens
from art_ruler.openai_server import OpenAIServer, counted, known_as, openai_server, price_of
from art_ruler.shorten import estimate_of
from art_ruler.view import NO_IMAGE

REFUSED = (401, 403, 404)
"""HTTP statuses that are about the judge itself, not about the question."""
PREFIXES = re.compile(r"^(?:(?:litellm\.)?\w+(?:Error|Exception)(?:: | - ))+")
"""Repeated exception names at the start of LiteLLM's errors."""
NOISE = re.compile(" ssl:<[^>]*>")
"""Object representations in LiteLLM's errors."""
CONNECT_SECONDS = 10.0
"""Most seconds to connect. LiteLLM observes it for OpenAI's API, Azure and Bedrock only."""
LONGEST_ERROR = 500
"""Most characters of an error that are shown."""
LONGEST_PAUSE = 60.0
"""Most seconds between two attempts."""
GROWING = tenacity.wait_random_exponential(multiplier=0.25, max=30)


class LiteLLMJudge:
    """``provider/model``, with the provider's key in the environment or in ``params``."""

    context: int | None = None
    priced = True
    images = True
    """True if LiteLLM does not know the model: an error is better than silently dropping images."""

    def __init__(
        self, model: str, *, timeout: float, retries: int, params: Mapping[str, Any], schema: JsonDict | None = SCHEMA
    ) -> None:
        """``schema`` is that of an answer, for models with structured output; None: any text."""
        self.name, self._schema = model, schema
        self.identity: str | None = None
        self._timeout, self._retries, self._params = timeout, retries, params
        # A connection that can't be made costs nothing, so it fails before `timeout` and is tried again.
        self._http_timeout = httpx.Timeout(timeout, connect=min(timeout / 2, CONNECT_SECONDS))
        self._litellm: ModuleType | None = None
        self._format: JsonDict = {}
        self._server: OpenAIServer | None = None
        """Bypasses LiteLLM's translation; None if something must be translated."""
        self._fetches_images = False
        """Whether the provider receives image URLs and fetches the images itself."""
        self._answered = False
        """Whether the judge has ever answered; after that, a rejected request concerns one group, and the run continues."""

    def prepare(self) -> None:
        if self._litellm is None:
            litellm = _litellm()
            self._look_up(litellm)
            self._litellm = litellm

    def _look_up(self, litellm: ModuleType) -> None:
        """Read what LiteLLM's table says about the model; LiteLLM's other look-ups send requests."""
        key, base = self._params.get("api_key"), self._params.get("api_base")
        try:
            provider_info = litellm.get_llm_provider(self.name, api_base=base)
        except litellm.BadRequestError as error:
            reason = self._message(error)
            raise ConfigError(f"the judge {self.name!r} cannot be used: {reason}; check its name") from error
        missing = litellm.validate_environment(self.name, api_key=key, api_base=base)["missing_keys"]
        self._fetches_images = provider_info[1] == "openai"
        if self._fetches_images:
            base = litellm.OpenAIGPTConfig.get_api_base(base)
        params = {name: value for name, value in self._params.items() if name != "api_key"}
        params["api_base"] = base or provider_info[3]
        self.identity = json.dumps([self.name, params], sort_keys=True, default=repr)
        known = known_as(litellm, self.name)
        self.priced = known is not None or "input_cost_per_token" in self._params
        if known is not None:
            self.context = litellm.model_cost[known].get("max_input_tokens")
            self.images = bool(litellm.model_cost[known].get("supports_vision"))
        if self._schema and litellm.supports_response_schema(model=self.name):
            named = {"name": "scores", "strict": True, "schema": self._schema}
            self._format = {"type": "json_schema", "json_schema": named}
        self._server = openai_server(litellm, provider_info, self._params, self._http_timeout)
        # Last, because stored opinions need only the identity.
        if key is None and any(name.endswith("_API_KEY") for name in missing):
            raise ConfigError(
                f"the judge {self.name!r} cannot be used: it needs {' and '.join(missing)}; set it, or pass api_key= (any string "
                "for a server that needs no key)"
            )

    async def ask(self, messages: list[JsonDict]) -> Answer:
        import openai  # all of LiteLLM's errors derive from openai's

        try:
            answer = await self._retrying(messages)
        except openai.OpenAIError as error:
            if isinstance(error, self._litellm.ContextWindowExceededError):
                message = self._message(error)
                raise TooLong(f"the question is too long for the judge {self.name!r}: {message}") from error
            reason = f"{type(error).__name__}: {self._message(error)}"
            if not self._answered and getattr(error, "status_code", None) in REFUSED:
                raise ConfigError(
                    f"the judge {self.name!r} cannot be used: {reason}; check its name, api_base and key"
                ) from error
            raise JudgeError(f"the judge {self.name!r} gave no answer: {reason}") from error
        self._answered = True
        return answer if answer.input_tokens is not None else self._estimated(answer, messages)

    def _message(self, error: BaseException) -> str:
        """Return the message of a LiteLLM error, without the key, which some providers repeat when they reject it."""
        text = NOISE.sub("", PREFIXES.sub("", " ".join(str(error).split())))
        text = printable(without_keys(text, self._params.get("api_key")))
        return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}..."

    def _estimated(self, answer: Answer, messages: list[JsonDict]) -> Answer:
        """Add estimated token counts and their price to the answer of a server that does not count tokens."""
        estimated = with_tokens(answer, messages)
        cost = price_of(self._litellm, self.name, estimated.input_tokens, estimated.output_tokens)
        return replace(estimated, cost=cost)

    async def _retrying(self, messages: list[JsonDict]) -> Answer:
        attempts = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._retries + 1),
            wait=_pause,
            retry=tenacity.retry_if_exception(_may_pass),
            reraise=True,
        )
        return await attempts(self._complete, messages)

    async def _complete(self, messages: list[JsonDict]) -> Answer:
        """Make one attempt. The timeout covers all of it; an HTTP client's timeout restarts with every byte.

        Raises TimedOut, which isn't tried again: the provider bills every attempt.
        """
        assert self._litellm is not None
        deadline = asyncio.timeout(self._timeout)
        try:
            async with deadline:
                return await self._attempt(messages)
        except (TimeoutError, self._litellm.Timeout) as error:
            if not deadline.expired():  # the server's 408, or no connection
                raise
            cost = price_of(self._litellm, self.name, estimate_of(messages), 0)
            raise TimedOut(repr(self.name), self._timeout, cost) from error

    async def _attempt(self, messages: list[JsonDict]) -> Answer:
        if self._server is not None and not self._server.has_listeners():
            return await self._server.complete(messages, self._format)
        sent = messages if self._fetches_images else _without_image_urls(messages)
        request = {"model": self.name, "messages": sent, "timeout": self._http_timeout}
        request |= {"max_retries": 0}  # retries are ours
        request |= {"response_format": self._format} if self._format else {}
        return _answer(await self._litellm.acompletion(**request | dict(self._params)), self._params.get("api_key"))


def _answer(answer: Any, key: str | None) -> Answer:
    if not answer.choices:
        raise JudgeError(f"the judge's answer has no choices: {without_keys(str(answer), key)[:200]!r}")
    choice, usage = answer.choices[0], getattr(answer, "usage", None)
    counts = counted(getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None))
    return Answer(
        choice.message.content or "",
        *counts,
        answer._hidden_params.get("response_cost"),
        None if choice.finish_reason == "stop" else choice.finish_reason,
    )


def _without_image_urls(messages: list[JsonDict]) -> list[JsonDict]:
    """Replace images that are URLs by a placeholder.

    For some providers LiteLLM would fetch them from this machine, although untrusted agents choose the URLs.
    """
    return [
        message if isinstance(message["content"], str) else message | {"content": [*map(_inline, message["content"])]}
        for message in messages
    ]


def _inline(part: JsonDict) -> JsonDict:
    if part["type"] != "image_url" or part["image_url"]["url"].startswith("data:"):
        return part
    return {"type": "text", "text": NO_IMAGE}


def _may_pass(error: BaseException) -> bool:
    status = getattr(error, "status_code", None)  # all LiteLLM errors have one, even timeouts and lost connections
    return status is not None and (status in (408, 409, 429) or status >= 500)


def _pause(state: tenacity.RetryCallState) -> float:
    """Return the seconds to wait: the server's ``retry-after``, or growing pauses."""
    error = state.outcome.exception() if state.outcome else None
    retry_after = (getattr(error, "litellm_response_headers", None) or {}).get("retry-after", "")
    return min(float(retry_after), LONGEST_PAUSE) if retry_after.isdecimal() else GROWING(state)


@functools.cache
def _litellm() -> ModuleType:
    # Without this the import fetches a price list from the network.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.suppress_debug_info = True  # otherwise every error prints advice to stdout
    return litellm
