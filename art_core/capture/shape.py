"""Whether what an upstream answers is a completion or a chunk of one, before anything is made of it. Pure; knows only JSON.

Only what is read here later is looked at: other fields go to the client as they came.
"""

from __future__ import annotations

import math
from typing import Any

import orjson

from art_core.errors import UpstreamError
from art_core.types import JsonDict

DEEPEST = 254
"""Lists and objects in one another that orjson writes; it reads more."""
MOST_CALLS = 1024
"""Tool calls of one message: its index makes room for all before it."""
TEXTS = ("role", "content", "reasoning_content", "reasoning", "refusal")


def check_shape(answer: JsonDict) -> None:
    """Raise UpstreamError (502) for what is no completion and no chunk."""
    _hold(answer, "choices", list)
    _numbers(answer, "logprobs_temperature")
    usage = _hold(answer, "usage", dict)
    _numbers(usage, "prompt_tokens", "completion_tokens", "total_tokens")
    _numbers(_hold(usage, "prompt_tokens_details", dict), "cached_tokens")
    _numbers(_hold(usage, "completion_tokens_details", dict), "reasoning_tokens")
    for choice in answer.get("choices") or ():
        if not isinstance(choice, dict):
            raise misshapen("a choice", choice)
        _check_choice(choice)


def _check_choice(choice: JsonDict) -> None:
    _index(choice, 2**31)
    _hold(choice, "finish_reason", str)
    for name in ("token_ids", "token_logprobs", "forced"):
        _hold(choice, name, list)
    if "message" in choice and not isinstance(choice["message"], dict):
        raise misshapen("a message", choice["message"])
    for name in ("message", "delta"):
        said = _hold(choice, name, dict)
        for text in TEXTS:
            _hold(said, text, str)
        for call in _hold(said, "tool_calls", list):
            _check_call(call)
    logprobs = _hold(choice, "logprobs", dict)
    for token in _hold(logprobs, "content", list):
        _check_token(token)
        for other in _hold(token, "top_logprobs", list):
            _check_token(other)


def _check_token(token: Any) -> None:
    if not isinstance(token, dict) or not isinstance(token.get("token"), str) or token.get("logprob") is None:
        raise misshapen("a token of logprobs", token)
    _numbers(token, "logprob")


def _check_call(call: Any) -> None:
    if not isinstance(call, dict):
        raise misshapen("a tool call", call)
    _index(call, MOST_CALLS)
    _hold(call, "id", str)
    _hold(call, "type", str)
    for name, text in _hold(call, "function", dict).items():
        if not isinstance(text, str | None):
            raise misshapen(f"a function's {name!r}", text)


def _hold(it: JsonDict, name: str, kind: type) -> Any:
    """Return a field, empty where there is none. Raises where it is of another kind."""
    found = it.get(name)
    if not isinstance(found, kind | None):
        raise misshapen(repr(name), found)
    return kind() if found is None else found


def _index(it: JsonDict, end: int) -> None:
    if "index" in it and (type(it["index"]) is not int or not 0 <= it["index"] < end):
        raise misshapen("'index'", it["index"])


def _numbers(it: JsonDict, *names: str) -> None:
    for name in names:
        found = it.get(name)
        if found is not None and not (isinstance(found, int | float) and math.isfinite(found)):
            raise misshapen(repr(name), found)


def misshapen(what: str, found: object) -> UpstreamError:
    """Return the error for an answer that has not the shape of a completion."""
    return UpstreamError(
        f"the upstream's answer has not the shape of a completion: {what} is {found!r:.200}", status=502
    )


def too_deep(text: bytes, value: object) -> bool:
    """Whether JSON that was read as ``value`` is nested deeper than can be written again."""
    if text.count(b"[") + text.count(b"{") <= DEEPEST:
        return False
    try:
        orjson.dumps(value)
    except TypeError:
        return True
    return False
