"""Any model that LiteLLM reaches, as a judge. Knows nothing about what is asked.

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

import tenacity

from art_core.errors import ConfigError
from art_core.redaction import printable, without_keys
from art_core.types import JsonDict
from art_ruler.answer import SCHEMA
from art_ruler.judge import Answer, JudgeError, TooLong, with_tokens
from art_ruler.openai_server import OpenAIServer, counted, known_as, openai_server, price_of
from art_ruler.view import NO_IMAGE

REFUSED = (401, 403, 404)
"""HTTP statuses that are about the judge, not about what it was asked."""
PREFIXES = re.compile(r"^(?:(?:litellm\.)?\w+(?:Error|Exception)(?:: | - ))+")
NOISE = re.compile(" ssl:<[^>]*>")
"""What an error of LiteLLM's begins with, again and again; and objects in it, which say nothing."""
LONGEST_ERROR = 500
"""Characters."""
LONGEST_PAUSE = 60.0
"""Seconds, between two attempts."""
GROWING = tenacity.wait_random_exponential(multiplier=0.25, max=30)


class LiteLLMJudge:
    """``provider/model`` with its provider's key in the environment, or in ``params``."""

    context: int | None = None
    priced = True
    images = True
    """True where LiteLLM does not know the model: better refused than left out in silence."""

    def __init__(self, model: str, *, timeout: float, retries: int, params: Mapping[str, Any]) -> None:
        self.name = model
        self.identity: str | None = None
        self._timeout, self._retries, self._params = timeout, retries, params
        self._litellm: ModuleType | None = None
        self._format: JsonDict = {}
        self._server: OpenAIServer | None = None
        """Where to ask without LiteLLM's translation, where nothing is to be translated."""
        self._fetches = False
        """Whether the provider gets a picture's address as it is, and fetches the picture itself."""
        self._answered = False
        """Whether it ever did: from then on a refusal is about one group, and the run goes on."""

    def prepare(self) -> None:
        if self._litellm is None:
            litellm = _litellm()
            self._look_up(litellm)
            self._litellm = litellm

    def _look_up(self, litellm: ModuleType) -> None:
        """Note what LiteLLM knows about the model. Its table only: other look-ups of it ask servers."""
        key, base = self._params.get("api_key"), self._params.get("api_base")
        try:
            found = litellm.get_llm_provider(self.name, api_base=base)
        except litellm.BadRequestError as error:
            raise ConfigError(f"the judge {self.name!r} cannot be used: {self._said(error)}; check its name") from error
        missing = litellm.validate_environment(self.name, api_key=key, api_base=base)["missing_keys"]
        if key is None and any(name.endswith("_API_KEY") for name in missing):
            raise ConfigError(
                f"the judge {self.name!r} cannot be used: it needs {' and '.join(missing)}; set it, or give api_key= (any text "
                "will do for a server that asks for none)"
            )
        self._fetches = found[1] == "openai"
        if self._fetches:
            base = litellm.OpenAIGPTConfig.get_api_base(base)
        decides = {name: value for name, value in self._params.items() if name != "api_key"} | {
            "api_base": base or found[3]
        }
        self.identity = json.dumps([self.name, decides], sort_keys=True, default=repr)
        known = known_as(litellm, self.name)
        self.priced = known is not None or "input_cost_per_token" in self._params
        if known is not None:
            self.context = litellm.model_cost[known].get("max_input_tokens")
            self.images = bool(litellm.model_cost[known].get("supports_vision"))
        if litellm.supports_response_schema(model=self.name):
            self._format = {"type": "json_schema", "json_schema": {"name": "scores", "strict": True, "schema": SCHEMA}}
        self._server = openai_server(litellm, found, self._params, self._timeout)

    async def ask(self, messages: list[JsonDict]) -> Answer:
        import openai  # all of LiteLLM's errors derive from openai's

        try:
            answer = await self._retrying(messages)
        except openai.OpenAIError as error:
            if isinstance(error, self._litellm.ContextWindowExceededError):
                raise TooLong(f"the question is too long for the judge {self.name!r}: {self._said(error)}") from error
            what = f"{type(error).__name__}: {self._said(error)}"
            if not self._answered and getattr(error, "status_code", None) in REFUSED:
                raise ConfigError(
                    f"the judge {self.name!r} cannot be used: {what}; check its name, api_base and key"
                ) from error
            raise JudgeError(f"the judge {self.name!r} gave no answer: {what}") from error
        self._answered = True
        return answer if answer.input_tokens is not None else self._estimated(answer, messages)

    def _said(self, error: BaseException) -> str:
        """Return what an error of LiteLLM's says, without the key, which some providers say when they refuse it."""
        text = NOISE.sub("", PREFIXES.sub("", " ".join(str(error).split())))
        text = printable(without_keys(text, self._params.get("api_key")))
        return text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}..."

    def _estimated(self, answer: Answer, messages: list[JsonDict]) -> Answer:
        """Return the answer of a server that counts no tokens with about as many as they are, and their price."""
        whole = with_tokens(answer, messages)
        return replace(whole, cost=price_of(self._litellm, self.name, whole.input_tokens, whole.output_tokens))

    async def _retrying(self, messages: list[JsonDict]) -> Answer:
        attempts = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._retries + 1),
            wait=_pause,
            retry=tenacity.retry_if_exception(_may_pass),
            reraise=True,
        )
        return await attempts(self._complete, messages)

    async def _complete(self, messages: list[JsonDict]) -> Answer:
        """Ask once. The limit is of the whole attempt: that of HTTP clients begins anew with every byte."""
        assert self._litellm is not None
        try:
            async with asyncio.timeout(self._timeout):
                return await self._attempt(messages)
        except TimeoutError as error:
            said = f"no whole answer within {self._timeout:g} s; give a larger timeout="
            raise self._litellm.Timeout(said, self.name, "") from error

    async def _attempt(self, messages: list[JsonDict]) -> Answer:
        if self._server is not None and not self._server.heard():
            return await self._server.complete(messages, self._format)
        told = messages if self._fetches else _without_addresses(messages)
        request = {"model": self.name, "messages": told, "timeout": self._timeout}
        request |= {"max_retries": 0}  # attempts are counted in one place
        request |= {"response_format": self._format} if self._format else {}
        return _answer(await self._litellm.acompletion(**request | dict(self._params)), self._params.get("api_key"))


def _answer(answer: Any, key: str | None) -> Answer:
    if not answer.choices:
        raise JudgeError(f"the judge answered without any choice: {without_keys(str(answer), key)[:200]!r}")
    choice, usage = answer.choices[0], getattr(answer, "usage", None)
    counts = counted(getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None))
    return Answer(
        choice.message.content or "",
        *counts,
        answer._hidden_params.get("response_cost"),
        None if choice.finish_reason == "stop" else choice.finish_reason,
    )


def _without_addresses(messages: list[JsonDict]) -> list[JsonDict]:
    """Return the messages without pictures that are addresses: for some providers LiteLLM would ask for them from this machine,
    and it is agents who choose them."""
    return [
        message if isinstance(message["content"], str) else message | {"content": [*map(_held, message["content"])]}
        for message in messages
    ]


def _held(part: JsonDict) -> JsonDict:
    if part["type"] != "image_url" or part["image_url"]["url"].startswith("data:"):
        return part
    return {"type": "text", "text": NO_IMAGE}


def _may_pass(error: BaseException) -> bool:
    status = getattr(error, "status_code", None)  # LiteLLM's errors all have one, timeouts and lost connections too
    return status is not None and (status in (408, 409, 429) or status >= 500)


def _pause(state: tenacity.RetryCallState) -> float:
    """Return the seconds to wait: what the server asks for, or growing ones."""
    error = state.outcome.exception() if state.outcome else None
    asked = (getattr(error, "litellm_response_headers", None) or {}).get("retry-after", "")
    return min(float(asked), LONGEST_PAUSE) if asked.isdecimal() else GROWING(state)


@functools.cache
def _litellm() -> ModuleType:
    # Without this the import fetches a price list from the network.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.suppress_debug_info = True  # it prints advice to stdout at every error
    return litellm
