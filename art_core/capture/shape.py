"""Whether what an upstream answers is a completion or a chunk of one, before anything is made of it. Pure; knows only JSON.

Only what is read here later is looked at: other fields go to the client as they came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson

from art_core.errors import UpstreamError
from art_core.types import JsonDict

DEEPEST = 254
"""Lists and objects in one another that orjson writes; it reads more."""
MOST_CALLS = 1024
"""Tool calls of one message: its index makes room for all before it."""
Number = int | float
ANSWER = {"choices": list, "usage": dict, "logprobs_temperature": Number}
USAGE = {
    "prompt_tokens": Number, "completion_tokens": Number, "total_tokens": Number, "prompt_tokens_details": dict,
    "completion_tokens_details": dict,
}  # fmt: skip
DETAILS = {"cached_tokens": Number, "reasoning_tokens": Number}
CHOICE = {
    "finish_reason": str, "delta": dict, "token_ids": list, "token_logprobs": list, "forced": list, "logprobs": dict,
}  # fmt: skip
SAID = {"role": str, "content": str, "reasoning_content": str, "reasoning": str, "refusal": str, "tool_calls": list}
CALL = {"id": str, "type": str, "function": dict}
TOKENS = {"content": list}
TOKEN = {"token": str, "logprob": Number, "top_logprobs": list}
"""What the fields of each may be where they are not null."""


def check_shape(answer: JsonDict) -> None:
    """Raise UpstreamError (502) for what is no completion and no chunk."""
    _hold(answer, ANSWER, "an answer")
    if usage := answer.get("usage"):
        _hold(usage, USAGE, "'usage'")
        for details in ("prompt_tokens_details", "completion_tokens_details"):
            _hold(usage.get(details) or {}, DETAILS, repr(details))
    for choice in answer.get("choices") or ():
        _hold(choice, CHOICE, "a choice")
        _check_index(choice, 2**31)
        if "message" in choice:
            _check_said(choice["message"])
        _check_said(choice.get("delta") or {})
        if logprobs := choice.get("logprobs"):
            _hold(logprobs, TOKENS, "'logprobs'")
            for token in logprobs.get("content") or ():
                _check_token(token)
                for other in token.get("top_logprobs") or ():
                    _check_token(other)


def _check_said(message: Any) -> None:
    _hold(message, SAID, "a message")
    for call in message.get("tool_calls") or ():
        _hold(call, CALL, "a tool call")
        _check_index(call, MOST_CALLS)
        function = call.get("function") or {}
        _hold(function, dict.fromkeys(function, str), "a function")


def _check_token(token: Any) -> None:
    _hold(token, TOKEN, "a token of logprobs")
    if token.get("token") is None or token.get("logprob") is None:
        raise misshapen("a token of logprobs", token)


def _hold(it: Any, kinds: Mapping[str, Any], what: str) -> None:
    if not isinstance(it, dict):
        raise misshapen(what, it)
    for name, found in it.items():
        if found is None or name not in kinds:
            continue
        if not isinstance(found, kinds[name]) or (kinds[name] is Number and not math.isfinite(found)):
            raise misshapen(f"{name!r} of {what}", found)


def _check_index(it: JsonDict, end: int) -> None:
    if "index" in it and (type(it["index"]) is not int or not 0 <= it["index"] < end):
        raise misshapen("'index'", it["index"])


def misshapen(what: str, found: object) -> UpstreamError:
    """Return the error for an answer that has not the shape of a completion. Of its values, only numbers are shown: a text may
    be the key that the upstream was sent."""
    shown = repr(found) if isinstance(found, Number | None) else f"of type {type(found).__name__}"
    return UpstreamError(f"the upstream's answer has not the shape of a completion: {what} is {shown}", status=502)


def too_deep(text: bytes, value: object) -> bool:
    """Whether JSON that was read as ``value`` is nested deeper than can be written again."""
    if text.count(b"[") + text.count(b"{") <= DEEPEST:
        return False
    try:
        orjson.dumps(value)
    except TypeError:
        return True
    return False
