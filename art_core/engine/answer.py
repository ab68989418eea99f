"""Sampled text -> the parts of an assistant message: content and tool calls. Knows nothing about tokens or models.

Tool calls are in the format of Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable

from art_core.types import JsonDict

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Templates put one line break between content and call; as part of the content it would come back doubled.
START = re.compile(r"\n?" + re.escape(OPEN))


class Answer:
    """Takes the text as it comes and returns deltas as OpenAI's streams have them, each part as soon as it is certain."""

    def __init__(self, *, tools: bool, stop: tuple[str, ...] = ()) -> None:
        self._tools = tools
        self._stop = stop
        self._pending = ""
        self._cut = False
        self._after_call = False
        """Whether the pending text follows a tool call directly: then it counts only if it is more than white space."""
        self.calls = 0
        """Tool calls found so far."""

    def feed(self, text: str, *, final: bool = False) -> list[JsonDict]:
        """Return the deltas that ``text`` completes; with ``final`` everything that is left."""
        if self._cut:
            return []
        self._pending += text
        places = [place for stop in self._stop if (place := self._pending.find(stop)) >= 0]
        if places:
            self._pending, self._cut, final = self._pending[: min(places)], True, True
        deltas = []
        while self._pending and (delta := self._next(final)) is not None:
            deltas += delta
        return deltas

    def _next(self, final: bool) -> list[JsonDict] | None:
        """Take one part off the pending text; None where more text is needed first."""
        start = START.search(self._pending) if self._tools else None
        if start is None:
            return self._text(final)
        if start.start():
            return self._take(start.start())
        end = self._pending.find(CLOSE)
        if end < 0:
            return self._take(len(self._pending)) if final else None
        call = parse_tool_call(self._pending[start.end() : end])
        if call is None:
            return self._take(end + len(CLOSE))
        self._pending = self._pending[end + len(CLOSE) :]
        self._after_call = True
        self.calls += 1
        name, arguments = call
        function = {"name": name, "arguments": arguments}
        identifier = f"call_{uuid.uuid4().hex[:24]}"
        return [{"tool_calls": [{"index": self.calls - 1, "id": identifier, "type": "function", "function": function}]}]

    def _text(self, final: bool) -> list[JsonDict] | None:
        """Take what is certainly content off pending text that has no tool call in it."""
        certain = len(self._pending) - (0 if final else self._held())
        if self._after_call and self._pending[:certain].isspace():
            self._pending = "" if final else self._pending
            return [] if final else None
        return self._take(certain) if certain else None

    def _take(self, length: int) -> list[JsonDict]:
        """Take ``length`` characters as content."""
        text, self._pending = self._pending[:length], self._pending[length:]
        self._after_call = False
        return [{"content": text}]

    def _held(self) -> int:
        """How many characters at the end may yet become a marker or a stop string."""
        markers = [*self._stop, *([OPEN, "\n" + OPEN] if self._tools else [])]
        longest = max((len(marker) for marker in markers), default=1) - 1
        sizes = range(min(longest, len(self._pending)), 0, -1)
        return next((size for size in sizes if any(m.startswith(self._pending[-size:]) for m in markers)), 0)


def parse_tool_call(text: str) -> tuple[str, str] | None:
    """Return a call's name and its arguments as the JSON text that was sampled; None where it is malformed.

    The text is kept as it is, because only then does the next prompt show the call as it was sampled.
    """
    spans = _members(text.strip())
    if spans is None or "name" not in spans or "arguments" not in spans:
        return None
    name, arguments = json.loads(spans["name"]), spans["arguments"]
    if not isinstance(name, str) or not name or not isinstance(json.loads(arguments), dict):
        return None
    return name, arguments


def _members(text: str) -> dict[str, str] | None:
    """Return the members of a JSON object as name -> JSON text of the value; None where ``text`` is no JSON object."""
    try:
        if not isinstance(json.loads(text), dict):
            return None
    except (ValueError, RecursionError):  # malformed; an integer of more digits than Python reads; too deep
        return None
    decoder, spans = json.JSONDecoder(), {}
    place = _skip(text, 1)
    while text[place] != "}":
        name, place = decoder.raw_decode(text, place)
        start = _skip(text, _skip(text, place) + 1)
        _, place = decoder.raw_decode(text, start)
        spans[name] = text[start:place]
        place = _skip(text, place)
        if text[place] == ",":
            place = _skip(text, place + 1)
    return spans


def _skip(text: str, place: int) -> int:
    while text[place] in " \t\r\n":
        place += 1
    return place


def message(deltas: Iterable[JsonDict]) -> JsonDict:
    """Put deltas together to an assistant message; content is None where there are only tool calls."""
    content, calls = "", []
    for delta in deltas:
        content += delta.get("content", "")
        calls += [{key: call[key] for key in ("id", "type", "function")} for call in delta.get("tool_calls", ())]
    result: JsonDict = {"role": "assistant", "content": content if content or not calls else None}
    if calls:
        result["tool_calls"] = calls
    return result
