"""Mistral and similar formats: a marker and a JSON list of ``{"name": ..., "arguments": {...}}``.

Mistral's newer models write ``[TOOL_CALLS]NAME{...}`` or ``[TOOL_CALLS]NAME[ARGS]{...}`` for every call.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping

from art_embedded.formats.call import Before, Read, Schemas, Terminals, ToolCall, find_any, unread
from art_embedded.formats.json_text import call_in, decode, items, members, nonempty_string
from art_embedded.requests import Schema


class Lists:
    """A marker and a JSON list."""

    begins = ""
    one_batch = True
    list_start = '"["'
    """As part of a grammar."""

    def __init__(self, marker: str) -> None:
        self.markers = (marker,)
        self.openings = (marker,)

    def find(self, text: str, before: Before) -> int | None:
        return find_any(text, self.openings)

    def read(self, text: str, schemas: Schemas, final: bool) -> Read | None:
        marker = text.find(self.openings[0])
        if marker < 0:
            return unread(text, final)
        start = _skip(text, marker + len(self.openings[0]))
        if start < len(text) and text[start] != "[":
            return self._other(text, start, final)
        decoded = decode(text, start)
        if decoded is None:
            return unread(text, final)
        calls = [self._call(item) for item in items(text[start : decoded[1]]) or ()]
        return Read(decoded[1], None if None in calls or not calls else calls)

    def _other(self, text: str, start: int, final: bool) -> Read | None:
        return Read(start, None)

    def _call(self, item: str) -> ToolCall | None:
        call = call_in(item, "arguments")
        return None if call is None else ToolCall(*call)

    def rules(self, calls: Mapping[str, Schema], several: bool, terminals: Terminals) -> list[str]:
        names = [f"function_{number}" for number in range(len(calls))]
        heads = [f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ' for name in calls]
        functions = [
            f"{name}: {terminals.text(head)} {terminals.json(schema)} {terminals.text('}')}"
            for name, head, schema in zip(names, heads, calls.values(), strict=True)
        ]
        more = ' (", " call)*' if several else ""
        return [f'body: {self.list_start} call{more} "]"', f"call: {' | '.join(names)}", *functions]


NAMED = re.compile(r"([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*([^\s\[\]{}]+)\s*)?(?:\[ARGS\]\s*)?(?=\{)")
UNFINISHED = re.compile(r"[^\s\[\]{}]*\s*(?:\[[A-Z_]*\]?\s*(?:[^\s\[\]{}]+\s*)?(?:\[[A-Z]*\]?\s*)?)?")
ARGUMENTS, IDENTIFIER = "[ARGS]", "[CALL_ID]"


class Mistral(Lists):
    """Both of Mistral's forms."""

    list_start = '" "? "["'
    """Some tokenizers' templates write the space, others don't."""

    def __init__(self) -> None:
        super().__init__("[TOOL_CALLS]")
        self.markers = ("[TOOL_CALLS]", ARGUMENTS, IDENTIFIER)

    def _other(self, text: str, start: int, final: bool) -> Read | None:
        head = NAMED.match(text, start)
        if head is None:
            return unread(text, final) if UNFINISHED.fullmatch(text, start) else Read(start, None)
        decoded = decode(text, head.end())
        if decoded is None:
            return unread(text, final)
        return Read(decoded[1], [ToolCall(head[1], text[head.end() : decoded[1]], head[2] or _identifier())])

    def _call(self, item: str) -> ToolCall | None:
        call = super()._call(item)
        identifier = (members(item) or {}).get("id", '""')
        return None if call is None else call._replace(identifier=nonempty_string(identifier) or _identifier())

    def rules(self, calls: Mapping[str, Schema], several: bool, terminals: Terminals) -> list[str]:
        if not terminals.has(ARGUMENTS):
            return super().rules(calls, several, terminals)
        functions = [
            f"function_{number}: {terminals.text(name)} {terminals.marker(ARGUMENTS)} {terminals.json(schema)}"
            for number, (name, schema) in enumerate(calls.items())
        ]
        names = " | ".join(f"function_{number}" for number in range(len(calls)))
        more = f" ({terminals.marker(self.openings[0])} call)*" if several else ""
        return [f"body: call{more}", f"call: {names}", *functions]


def _identifier() -> str:
    """Return a random id as Mistral's templates require: nine letters and digits."""
    return uuid.uuid4().hex[:9]


def _skip(text: str, start: int) -> int:
    return len(text) - len(text[start:].lstrip())
