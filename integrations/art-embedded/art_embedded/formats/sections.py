"""Kimi K2 and DeepSeek V3.1: a section of calls, each with a heading and JSON arguments between markers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from art_embedded.formats.call import Before, Read, Schemas, Terminals, ToolCall, find_any, unread
from art_embedded.formats.json_text import decode
from art_embedded.requests import Schema


class Markers(NamedTuple):
    """The format's markers in their order."""

    section: str
    call: str
    arguments: str
    call_end: str
    section_end: str


KIMI = Markers(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
DEEPSEEK = Markers(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
NUMBERED = re.compile(r"(?:functions\.)?(\S+):\d+")


class Sections:
    """``numbered``: the heading is ``functions.NAME:INDEX``, which is also the call's id; else it is the function's name."""

    begins = ""
    one_batch = True

    def __init__(self, markers: Markers, *, numbered: bool) -> None:
        self.markers = markers
        self.openings = (markers.section, markers.call)
        self._numbered = numbered

    def find(self, text: str, before: Before) -> int | None:
        return find_any(text, (*self.openings, self.markers.section_end) if before == "call" else self.openings)

    def read(self, text: str, schemas: Schemas, final: bool) -> Read | None:
        marks = self.markers
        text_start = len(text) - len(text.lstrip())
        if text.startswith(marks.section_end, text_start):
            return Read(text_start + len(marks.section_end), [])
        end = text.find(marks.call_end)
        if end < 0:
            return unread(text, final)
        heading, parted, arguments = text[:end].strip().removeprefix(marks.section).strip().partition(marks.arguments)
        call = self._call(heading, arguments.strip() or "{}") if parted else None
        return Read(end + len(marks.call_end), None if call is None else [call])

    def _call(self, heading: str, arguments: str) -> ToolCall | None:
        if not heading.startswith(self.markers.call) or not arguments.startswith("{"):
            return None
        decoded = decode(arguments)
        heading = heading.removeprefix(self.markers.call).strip()
        if decoded is None or decoded[1] != len(arguments):
            return None
        if not self._numbered:
            return ToolCall(heading, arguments) if heading else None
        numbered = NUMBERED.fullmatch(heading)
        return ToolCall(numbered[1], arguments, heading) if numbered else None

    def rules(self, calls: Mapping[str, Schema], several: bool, terminals: Terminals) -> list[str]:
        _, call, separator, call_end, section_end = map(terminals.marker, self.markers)
        functions = []
        for number, (name, schema) in enumerate(calls.items()):
            heading = f"{terminals.text(f'functions.{name}:')} INDEX" if self._numbered else terminals.text(name)
            functions.append(f"function_{number}: {heading} {separator} {terminals.json(schema)}")
        index = ["INDEX: /0|[1-9][0-9]{0,2}/"] if self._numbered else []
        names = " | ".join(f"function_{number}" for number in range(len(calls)))
        return [
            f"body: call{'+' if several else ''} {section_end}",
            f"call: {call} function {call_end}",
            f"function: {names}",
            *functions,
            *index,
        ]
