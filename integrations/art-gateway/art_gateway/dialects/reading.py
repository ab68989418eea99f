"""Reads requests that may be malformed, and refuses what chat completions can't express."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from art_core.errors import UpstreamError
from art_core.types import JsonDict

INVALID_JSON = "INVALID_JSON"
"""The key for a tool call's arguments that aren't a JSON object, as Anthropic advises."""


def names(text: str) -> frozenset[str]:
    """Return the words in ``text``."""
    return frozenset(text.split())


def refused(what: str, instead: str, code: str = "not_translated") -> UpstreamError:
    """Return the 400 for what is valid in the dialect but has no counterpart in chat completions."""
    return UpstreamError(f"{what} can't be translated to chat completions; {instead}", status=400, code=code)


def malformed(message: str) -> UpstreamError:
    """Return the 400 for what isn't valid in the dialect."""
    return UpstreamError(message, status=400, code="invalid_request")


def read_leniently(content: bytes) -> Any:
    """Return JSON with "\ufffd" for lone surrogates, which JavaScript writes for half an emoji, and None for NaN and infinities.

    Raises ValueError for what isn't JSON.
    """
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        try:
            text = json.dumps(json.loads(content, parse_constant=lambda _: None), ensure_ascii=False)
            return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


def objects(value: Any, where: str) -> list[JsonDict]:
    """Return ``value``, which must be a list of JSON objects."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise malformed(f"{where} must be a list of objects")
    return value


def text_of(item: JsonDict, name: str, where: str) -> str:
    """Return a field that must be a string."""
    value = item.get(name)
    if not isinstance(value, str):
        raise malformed(f"{where} needs {name!r} as a string, not {value!r}")
    return value


def kind_of(item: JsonDict, where: str) -> str | None:
    """Return the field ``type``, None if it is missing."""
    return None if item.get("type") is None else text_of(item, "type", where)


def object_of(item: JsonDict, name: str) -> JsonDict:
    """Return a field that must be an object; an empty one if it is missing."""
    value = item.get(name)
    if not isinstance(value, dict | None):
        raise malformed(f"{name!r} must be an object, not {value!r}")
    return value or {}


def refuse_unknown(item: JsonDict, known: Iterable[str], where: str) -> None:
    """Refuse fields that would be lost, except those that are off (null, false, empty)."""
    lost = sorted(key for key, value in item.items() if value not in (None, False, "", [], {}) and key not in known)
    if lost:
        raise refused(f"{where} with {', '.join(map(repr, lost))}", "leave it out")


def engine_settings(body: JsonDict, refusals: Mapping[str, str], known: Iterable[str]) -> JsonDict:
    """Return the request's settings that the dialect doesn't know: they are the engine's and are passed on unchanged.

    ``refusals`` are the dialect's parameters that can't be translated -> what to do instead. Those that are off are ignored.
    """
    for name, instead in refusals.items():
        if body.get(name) not in (None, False, "", [], {}):
            raise refused(repr(name), instead)
    return {key: value for key, value in body.items() if key not in known and key not in refusals}


def camel(item: JsonDict) -> JsonDict:
    """Return an object with its fields in camel case. Google's servers accept both, and clients mix them."""
    return {re.sub("_([a-z])", lambda found: found[1].upper(), name): value for name, value in item.items()}


def chat_content(parts: list[JsonDict]) -> str | list[JsonDict]:
    """Return chat content: a single text as a string, for chat templates that accept nothing else."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def schema_format(schema: Any) -> JsonDict:
    """Return chat's response format of an answer that must conform to a schema without a name."""
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}


def reasoning_in(delta: JsonDict) -> str:
    """Return the reasoning of a message or delta; servers use either name, some both."""
    return delta.get("reasoning_content") or delta.get("reasoning") or ""


def written(value: JsonDict) -> str:
    """Return the arguments of a tool call as text, as chat has them."""
    if value.keys() == {INVALID_JSON} and isinstance(value[INVALID_JSON], str):
        return value[INVALID_JSON]
    # With spaces, as models and templates write it: then the next prompt continues the answer as it was sampled.
    return json.dumps(value, ensure_ascii=False)


def written_value(value: Any) -> str:
    """Return JSON as templates write it."""
    return written({"value": value})[len('{"value": ') : -1]


def as_object(arguments: str) -> JsonDict:
    """Return the arguments as an object; text that isn't one, or changes when sent as one, goes under ``INVALID_JSON``."""
    try:
        value = json.loads(arguments or "{}")
        exact = isinstance(value, dict) and orjson.loads(orjson.dumps(value)) == value
    except (ValueError, TypeError, RecursionError):
        exact = False
    return value if exact else {INVALID_JSON: arguments}


def event(body: JsonDict) -> bytes:
    """Return a server-sent event, named by its type."""
    return b"event: " + body["type"].encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"
