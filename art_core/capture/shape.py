"""Checks the JSON of clients and upstreams before it is used.

Only the fields that capture reads are checked; others pass unchanged.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import orjson

from art_core.errors import UpstreamError
from art_core.types import JsonDict

MAX_DEPTH = 254
"""How deeply nested lists and objects orjson can write; it can read more."""
NUMBER = (int, float)


class Shape(NamedTuple):
    """A JSON object: its name in errors, and the kind of each field.

    A kind is a type, NUMBER (finite), a ``range`` of integers, an object's Shape, or ``[Shape]`` for a list of objects.
    """

    name: str
    fields: dict[str, Any]
    required: tuple[str, ...] = ()
    other_fields: Any = None
    """The kind of all other fields; None: they aren't checked."""


NOT_NULL = frozenset({"message", "index"})
"""Fields that may be missing but, unlike all others, not null."""
FUNCTION = Shape("a function", {}, other_fields=str)
# At most 1024 tool calls, because a high index makes room for all before it.
TOOL_CALL = Shape("a tool call", {"id": str, "type": str, "function": FUNCTION, "index": range(1024)})
TEXTS = dict.fromkeys(("role", "content", "reasoning_content", "reasoning", "refusal"), str)
MESSAGE = Shape("a message", {**TEXTS, "tool_calls": [TOOL_CALL]})
TOKEN = Shape("a token of logprobs", {"token": str, "logprob": NUMBER}, required=("token", "logprob"))
TOKEN.fields["top_logprobs"] = [TOKEN]
LOGPROBS = Shape("'logprobs'", {"content": [TOKEN]})
LISTS = dict.fromkeys(("token_ids", "token_logprobs", "forced"), list)
CHOICE = Shape(
    "a choice",
    {"index": range(2**31), "message": MESSAGE, "delta": MESSAGE, "finish_reason": str, "logprobs": LOGPROBS, **LISTS},
)
PROMPT_DETAILS = Shape("'prompt_tokens_details'", {"cached_tokens": NUMBER})
COMPLETION_DETAILS = Shape("'completion_tokens_details'", {"reasoning_tokens": NUMBER})
DETAILS = {"prompt_tokens_details": PROMPT_DETAILS, "completion_tokens_details": COMPLETION_DETAILS}
COUNTS = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), NUMBER)
USAGE = Shape("'usage'", {**COUNTS, **DETAILS})
ANSWER = Shape("an answer", {"choices": [CHOICE], "usage": USAGE, "logprobs_temperature": NUMBER})


def check_answer(answer: Any, shape: Shape = ANSWER) -> None:
    """Raise UpstreamError (502) unless ``answer`` is a completion or a chunk of one."""
    what, fields, required, other_fields = shape
    if not isinstance(answer, dict):
        raise _misshapen(what, answer)
    for name in required:
        if answer.get(name) is None:
            raise _misshapen(what, answer)
    for name, value in answer.items():
        kind = fields.get(name, other_fields)
        if kind is None or type(value) is kind or (value is None and name not in NOT_NULL):
            continue
        if type(kind) is list and isinstance(value, list):
            for item in value:
                check_answer(item, kind[0])
        elif type(kind) is Shape and isinstance(value, dict):
            check_answer(value, kind)
        elif not _fits(value, kind):
            raise _misshapen(f"{name!r} of {what}", value)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value that isn't checked field by field is of this kind."""
    if kind is NUMBER:
        return isinstance(value, NUMBER) and math.isfinite(value)
    if type(kind) is range:
        return type(value) is int and value in kind
    return type(kind) is type and isinstance(value, kind)


def _misshapen(what: str, value: object) -> UpstreamError:
    # Text isn't quoted, because it may be the key that the upstream was sent.
    description = repr(value) if isinstance(value, int | float | None) else f"of type {type(value).__name__}"
    return UpstreamError(f"the upstream's answer isn't a completion: {what} is {description}", status=502)


def check_request(request: JsonDict) -> None:
    """Raise UpstreamError (400) unless ``request`` is a chat request, or has a ``prompt`` instead of ``messages``."""
    messages, prompt, temperature = request.get("messages"), request.get("prompt"), request.get("temperature")
    if "prompt" in request and "messages" not in request:
        ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (ids or isinstance(prompt, str)):
            raise UpstreamError(
                "'prompt' must be a string or a list of token ids, and not empty; send several prompts as several "
                "requests",
                status=400,
            )
    elif not messages or not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise UpstreamError("'messages' must be a list with at least one message object", status=400)
    if not isinstance(temperature, int | float | None):
        raise UpstreamError(f"'temperature' must be a number, not {temperature!r}", status=400)


def read_object(text: bytes) -> JsonDict:
    """Return the JSON object in ``text``. Raises ValueError, whose message is the predicate of a sentence."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"is a {type(value).__name__}, not a JSON object")
    # Writing it shows whether it is too deep, which it can't be if it has few brackets.
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
        try:
            orjson.dumps(value)
        except TypeError:
            raise ValueError(f"is nested deeper than {MAX_DEPTH} levels") from None
    return value
