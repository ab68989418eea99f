"""Creates the judge for a model string, a LangChain chat model, or a function."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from art_core.errors import ConfigError
from art_core.types import JsonDict
from art_ruler.answer import SCHEMA
from art_ruler.judge import FunctionJudge, Judge, LangChainJudge


def judge_of(
    judge: object, *, timeout: float, retries: int, api_base: str | None = None, api_key: str | None = None,
    params: Mapping[str, Any] = MappingProxyType({}), schema: JsonDict | None = SCHEMA,
) -> Judge:  # fmt: skip
    """Return a judge for a model string, a LangChain model or a function; ConfigError for anything else.

    ``schema`` is that of an answer, for models with structured output; None: any text.
    """
    if isinstance(judge, str):
        from art_ruler.litellm_judge import LiteLLMJudge

        access = {name: value for name, value in (("api_base", api_base), ("api_key", api_key)) if value is not None}
        return LiteLLMJudge(judge, timeout=timeout, retries=retries, params=access | dict(params), schema=schema)
    if api_base is not None or api_key is not None or params:
        raise ConfigError(
            "api_base, api_key and params apply only to a judge that is a LiteLLM model string; remove them"
        )
    if callable(getattr(judge, "ainvoke", None)):
        return LangChainJudge(judge, timeout)
    if callable(judge) and not isinstance(judge, type):
        return FunctionJudge(judge, timeout)
    raise ConfigError(
        f"{judge!r} is not a judge: pass a LiteLLM model string such as 'openai/gpt-6-luna', a LangChain chat model, or "
        "`async def judge(messages) -> str`"
    )
