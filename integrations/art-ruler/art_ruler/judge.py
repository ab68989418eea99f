"""Messages -> the judge's text, through LiteLLM. Knows nothing about what is asked.

LiteLLM takes seconds to import, so it is imported in a thread when the first question is asked.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any

import tenacity

from art_core.errors import ConfigError
from art_core.types import JsonDict

Judge = Callable[[list[JsonDict]], Awaitable[str]]

SCHEMA: JsonDict = {
    "type": "object",
    "properties": {
        "scores": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "trajectory_id": {"type": "string"},
                    "explanation": {"type": "string"},
                    "score": {"type": "number"},
                },
                "required": ["trajectory_id", "explanation", "score"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["scores"],
    "additionalProperties": False,
}


class JudgeError(Exception):
    """The judge gave no answer."""


class LiteLLMJudge:
    """Any model that LiteLLM reaches."""

    def __init__(self, model: str, *, timeout: float, retries: int, params: Mapping[str, Any]) -> None:
        self.model = model
        self.timeout = timeout
        self.retries = retries
        self.params = params
        self._answered = False
        """Whether it ever did: from then on a refusal is about one group, and the run goes on."""

    async def __call__(self, messages: list[JsonDict]) -> str:
        """Return the answer's text. Raises JudgeError without one, ConfigError for a wrong model or key."""
        litellm = await asyncio.to_thread(_litellm)
        import openai  # all of LiteLLM's errors derive from openai's

        try:
            litellm.get_llm_provider(self.model, api_base=self.params.get("api_base"))
            answer = await self._retrying()(
                litellm.acompletion,
                model=self.model,
                messages=messages,
                timeout=self.timeout,
                max_retries=0,  # attempts are counted in one place
                **self._response_format(litellm) | self.params,
            )
        except openai.OpenAIError as error:
            if not self._answered and _is_permanent(error, litellm):
                raise ConfigError(
                    f"the judge {self.model!r} cannot be used: {error}; check its name, api_base and key"
                ) from error
            raise JudgeError(f"the judge {self.model!r} gave no answer: {type(error).__name__}: {error}") from error
        self._answered = True
        return answer.choices[0].message.content or ""

    def _retrying(self) -> tenacity.AsyncRetrying:
        return tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.retries + 1),
            wait=tenacity.wait_random_exponential(multiplier=0.25, max=30),
            retry=tenacity.retry_if_exception(_may_pass),
            reraise=True,
        )

    def _response_format(self, litellm: ModuleType) -> JsonDict:
        if not litellm.supports_response_schema(model=self.model):
            return {}
        schema = {"name": "scores", "strict": True, "schema": SCHEMA}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _is_permanent(error: Exception, litellm: ModuleType) -> bool:
    import openai

    if isinstance(error, litellm.ContextWindowExceededError | litellm.ContentPolicyViolationError):
        return False  # about what was asked
    refusals = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError, openai.BadRequestError)
    return isinstance(error, refusals)


def _may_pass(error: BaseException) -> bool:
    import openai

    if isinstance(error, openai.APIStatusError):
        return error.status_code in (408, 409, 429) or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError)  # timeouts are of this class


@functools.cache
def _litellm() -> ModuleType:
    # Without this the import fetches a price list from the network.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.suppress_debug_info = True  # it prints advice to stdout at every error
    return litellm
