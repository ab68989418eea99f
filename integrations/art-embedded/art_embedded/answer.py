"""Splits sampled text into the parts of an assistant message: thinking, content and tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping

from art_core.types import JsonDict
from art_embedded.formats import HERMES, Formats
from art_embedded.formats.call import Before, ToolCall, held_back
from art_embedded.formats.thinking import Place


class Answer:
    """Parses text incrementally into deltas of OpenAI's streaming format, each as soon as it is certain."""

    def __init__(
        self,
        *,
        tools: bool,
        stop: tuple[str, ...] = (),
        formats: Formats = HERMES,
        place: Place = "after",
        schemas: Mapping[str, JsonDict] | None = None,
    ) -> None:
        self._format = formats.calls if tools else None
        self._stop = stop
        self._thinking, self._place = formats.thinking, place if formats.thinking else "after"
        self._schemas = schemas or {}
        """Function name -> parameters; formats without JSON need them for the types of values."""
        self._pending = ""
        self._cut = False
        self._before: Before = "nothing"
        self._spaced = False
        """Whether a call or thinking directly precedes the pending text; then whitespace alone is dropped."""
        self.calls = 0
        """Number of tool calls so far."""

    def feed(self, text: str, *, final: bool = False) -> list[JsonDict]:
        """Return the deltas that ``text`` completes; with ``final``, everything that remains."""
        if self._cut:
            return []
        self._pending += text
        stops = [start for stop in self._stop if (start := self._pending.find(stop)) >= 0]
        if stops:
            self._pending, self._cut, final = self._pending[: min(stops)], True, True
        deltas = []
        while self._pending and (delta := self._next(final)) is not None:
            deltas += delta
        return deltas

    def _next(self, final: bool) -> list[JsonDict] | None:
        """Consume one part of the pending text; return its deltas, or None if more text is needed."""
        if self._place == "before":
            return self._begin(final)
        if self._place == "inside":
            return self._think(final)
        start = self._format.find(self._pending, self._before) if self._format else None
        skipped = start if self._spaced and self._pending[:start].isspace() else 0
        if self._format is None or start is None or start > skipped:
            return self._text(start, final)
        read = self._format.read(self._pending[start:], self._schemas, final)
        if read is None:
            return None
        if read.calls is None:
            return self._take(start + read.length)
        self._pending = self._pending[start + read.length :]
        self._before, self._spaced = "call", True
        return [self._call(call) for call in read.calls]

    def _begin(self, final: bool) -> list[JsonDict] | None:
        """Determine whether the answer begins with thinking."""
        opening = self._thinking.opening
        text = self._pending.lstrip()
        if text.startswith(opening):
            self._pending, self._place = text[len(opening) :], "inside"
        elif final or not opening.startswith(text):
            self._place = "after"
        else:
            return None
        return []

    def _think(self, final: bool) -> list[JsonDict] | None:
        """Consume the text that is certainly thinking."""
        closing = self._thinking.closing
        end = self._pending.find(closing)
        held = 0 if final else held_back(self._pending, [closing, *self._stop])
        thought = self._pending[: end if end >= 0 else len(self._pending) - held]
        self._pending = self._pending[len(thought) :]
        if end >= 0:
            self._pending, self._place, self._spaced = self._pending[len(closing) :], "after", True
        elif not thought:
            return None
        return [{"reasoning_content": thought}] if thought else []

    def _text(self, call: int | None, final: bool) -> list[JsonDict] | None:
        """Consume the text that is certainly content; the next call begins at ``call`` (None: no call)."""
        certain = len(self._pending) - (0 if final else held_back(self._pending, self._stop))
        certain = certain if call is None else min(call, certain)
        if self._spaced and not final and self._pending[:certain].isspace():
            return None
        return self._take(certain) if certain else None

    def _take(self, length: int) -> list[JsonDict]:
        """Consume ``length`` characters as content."""
        text, self._pending = self._pending[:length], self._pending[length:]
        if self._spaced and text.isspace():
            return []
        self._spaced = False
        if not text.isspace():
            self._before = "text"
        return [{"content": text}]

    def _call(self, call: ToolCall) -> JsonDict:
        self.calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        identifier = call.identifier or f"call_{uuid.uuid4().hex[:24]}"
        return {"tool_calls": [{"index": self.calls - 1, "id": identifier, "type": "function", "function": function}]}


def message(deltas: Iterable[JsonDict]) -> JsonDict:
    """Merge deltas into an assistant message; content is None if there are only tool calls."""
    content, thought, calls = "", "", []
    for delta in deltas:
        content += delta.get("content", "")
        thought += delta.get("reasoning_content", "")
        calls += [{key: call[key] for key in ("id", "type", "function")} for call in delta.get("tool_calls", ())]
    result: JsonDict = {"role": "assistant", "content": content if content or not calls else None}
    if thought:
        result["reasoning_content"] = thought
    if calls:
        result["tool_calls"] = calls
    return result
