"""Reads a request that may be malformed, and refuses what chat completions cannot express. Knows no dialect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from art_core.errors import UpstreamError
from art_core.types import JsonDict


def names(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def refused(what: str, instead: str) -> UpstreamError:
    """Return the 400 for what is valid in the dialect and has no counterpart in chat completions."""
    return UpstreamError(
        f"{what} is not translated to chat completions here; {instead}", status=400, code="not_translated"
    )


def malformed(what: str) -> UpstreamError:
    """Return the 400 for what is not valid in the dialect either."""
    return UpstreamError(what, status=400, code="invalid_request")


def objects(value: Any, where: str) -> list[JsonDict]:
    """Return ``value``, which must be a list of JSON objects."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise malformed(f"{where} must be a list of objects")
    return value


def text_of(thing: JsonDict, name: str, where: str) -> str:
    """Return a field that must be a string."""
    value = thing.get(name)
    if not isinstance(value, str):
        raise malformed(f"{where} needs {name!r} as a string, not {value!r}")
    return value


def kind_of(thing: JsonDict, where: str) -> str | None:
    """Return the type that a thing says it has, None where it says nothing."""
    return None if thing.get("type") is None else text_of(thing, "type", where)


def object_of(thing: JsonDict, name: str) -> JsonDict:
    """Return a field that must be an object; an empty one where it is missing."""
    value = thing.get(name)
    if not isinstance(value, dict | None):
        raise malformed(f"{name!r} must be an object, not {value!r}")
    return value or {}


def only(thing: JsonDict, known: Iterable[str], where: str) -> None:
    """Refuse fields that would be lost; those that are off (null, false, empty) say nothing."""
    lost = sorted(key for key, value in thing.items() if value not in (None, False, "", [], {}) and key not in known)
    if lost:
        raise refused(f"{where} with {', '.join(map(repr, lost))}", "leave it out")


def further(body: JsonDict, refusals: Mapping[str, str], known: Iterable[str]) -> JsonDict:
    """Return the request's own settings that the dialect does not know: they are the engine's and pass as they are.

    ``refusals`` are the dialect's parameters that cannot be translated, with what to do instead; those that are off pass.
    """
    for name, instead in refusals.items():
        if body.get(name) not in (None, False, "", [], {}):
            raise refused(repr(name), instead)
    return {key: value for key, value in body.items() if key not in known and key not in refusals}


def one_or_parts(parts: list[JsonDict]) -> str | list[JsonDict]:
    """Return chat content: a lone text as a string, for chat templates that take nothing else."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def reasoning_in(delta: JsonDict) -> str:
    """Return the reasoning of a message or delta; servers name it either way, some both."""
    return delta.get("reasoning_content") or delta.get("reasoning") or ""


def event(body: JsonDict) -> bytes:
    """Return a server-sent event named by its type."""
    return b"event: " + body["type"].encode() + b"\ndata: " + orjson.dumps(body) + b"\n\n"
