"""JSON text -> where its parts stand in it, so that they can be passed on letter for letter. Knows nothing about calls."""

from __future__ import annotations

import json
import re
from typing import Any


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


HALF = re.compile("[\ud800-\udfff]")
DECODER = json.JSONDecoder(parse_constant=_refuse)


def decode(text: str, place: int = 0) -> tuple[Any, int] | None:
    """Return the JSON value that begins at ``place``, and where it ends; None where none does."""
    try:
        return DECODER.raw_decode(text, place)
    except (ValueError, RecursionError):  # malformed; an integer of more digits than Python reads; too deep
        return None


def members(text: str) -> dict[str, str] | None:
    """Return the members of a JSON object as name -> JSON text of the value; None where ``text`` is no JSON object."""
    found = decode(text)
    if found is None or found[1] != len(text) or not isinstance(found[0], dict):
        return None
    place, spans = _skip(text, 1), {}
    while text[place] != "}":
        name, place = DECODER.raw_decode(text, place)
        start = _skip(text, _skip(text, place) + 1)
        _, place = DECODER.raw_decode(text, start)
        spans[name] = text[start:place]
        place = _comma(text, place)
    return spans


def items(text: str) -> list[str] | None:
    """Return the JSON texts of an array's items; None where ``text`` is no JSON array."""
    found = decode(text)
    if found is None or found[1] != len(text) or not isinstance(found[0], list):
        return None
    place, texts = _skip(text, 1), []
    while text[place] != "]":
        _, end = DECODER.raw_decode(text, place)
        texts.append(text[place:end])
        place = _comma(text, end)
    return texts


def call_in(text: str, *keys: str) -> tuple[str, str] | None:
    """Return the name and the arguments' text of ``{"name": ..., KEY: {...}}``; None where ``text`` is not that."""
    spans = members(text.strip()) or {}
    arguments = next((spans[key] for key in keys if key in spans), None)
    if arguments is None or not arguments.startswith("{") or "name" not in spans:
        return None
    name = said(spans["name"])
    return None if name is None else (name, arguments)


def said(text: str) -> str | None:
    """Return the string that JSON ``text`` stands for; None where it is none, an empty one, or no text."""
    value = json.loads(text)
    # JSON can escape half a pair of UTF-16, which no answer could be written with.
    return value if isinstance(value, str) and value and not HALF.search(value) else None


def _comma(text: str, place: int) -> int:
    place = _skip(text, place)
    return _skip(text, place + 1) if text[place] == "," else place


def _skip(text: str, place: int) -> int:
    while text[place] in " \t\r\n":
        place += 1
    return place
