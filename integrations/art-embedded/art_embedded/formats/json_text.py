"""Splits JSON text into its parts without reformatting them."""

from __future__ import annotations

import json
import re
from typing import Any


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} isn't JSON")


SURROGATE = re.compile("[\ud800-\udfff]")
DECODER = json.JSONDecoder(parse_constant=_refuse)


def decode(text: str, start: int = 0) -> tuple[Any, int] | None:
    """Return the JSON value that begins at ``start`` and its end, or None."""
    try:
        return DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):  # malformed, an integer too long for Python, or nested too deeply
        return None


def members(text: str) -> dict[str, str] | None:
    """Return name -> JSON text of the value for the members of a JSON object; None if ``text`` isn't one."""
    decoded = decode(text)
    if decoded is None or decoded[1] != len(text) or not isinstance(decoded[0], dict):
        return None
    position, spans = _skip(text, 1), {}
    while text[position] != "}":
        name, position = DECODER.raw_decode(text, position)
        start = _skip(text, _skip(text, position) + 1)
        _, position = DECODER.raw_decode(text, start)
        spans[name] = text[start:position]
        position = _comma(text, position)
    return spans


def items(text: str) -> list[str] | None:
    """Return the JSON texts of an array's items; None if ``text`` isn't a JSON array."""
    decoded = decode(text)
    if decoded is None or decoded[1] != len(text) or not isinstance(decoded[0], list):
        return None
    position, texts = _skip(text, 1), []
    while text[position] != "]":
        _, end = DECODER.raw_decode(text, position)
        texts.append(text[position:end])
        position = _comma(text, end)
    return texts


def call_in(text: str, *keys: str) -> tuple[str, str] | None:
    """Return the name and the arguments' text of ``{"name": ..., KEY: {...}}``; None if ``text`` has another form."""
    spans = members(text.strip()) or {}
    arguments = next((spans[key] for key in keys if key in spans), None)
    if arguments is None or not arguments.startswith("{") or "name" not in spans:
        return None
    name = nonempty_string(spans["name"])
    return None if name is None else (name, arguments)


def nonempty_string(text: str) -> str | None:
    """Return the string that the JSON ``text`` encodes; None if it is empty, not a string, or can't be encoded."""
    value = json.loads(text)
    # JSON can contain lone UTF-16 surrogates, which can't be sent in an answer.
    return value if isinstance(value, str) and value and not SURROGATE.search(value) else None


def _comma(text: str, position: int) -> int:
    position = _skip(text, position)
    return _skip(text, position + 1) if text[position] == "," else position


def _skip(text: str, position: int) -> int:
    while text[position] in " \t\r\n":
        position += 1
    return position
