"""Hermes, Qwen 2.5 and 3, and others: any number of ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

from __future__ import annotations

import json
from collections.abc import Mapping

from art_embedded.formats.call import Before, Read, Schemas, Terminals, ToolCall, after_line, find_any, unread
from art_embedded.formats.json_text import call_in
from art_embedded.requests import Schema


class Hermes:
    """JSON between two markers."""

    begins = ""
    one_batch = False

    def __init__(self, opening: str = "<tool_call>", closing: str = "</tool_call>") -> None:
        self.markers = (opening, closing)
        self.openings = (opening,)

    def find(self, text: str, before: Before) -> int | None:
        return find_any(text, after_line(self.openings))

    def read(self, text: str, schemas: Schemas, final: bool) -> Read | None:
        opening, closing = self.markers
        _, opened, rest = text.partition(opening)
        inside, closed, _ = rest.partition(closing)
        if not opened or not (closed or final):
            return unread(text, final)
        # At the end of an answer the closing marker may be missing: some models omit it, and stop strings cut it off.
        call = call_in(inside, "arguments")
        length = len(text) - len(rest) + len(inside) + len(closed)
        return Read(length, None if call is None else [ToolCall(*call)])

    def rules(self, calls: Mapping[str, Schema], several: bool, terminals: Terminals) -> list[str]:
        opening, closing = map(terminals.marker, self.markers)
        more = f' ("\\n" {opening} arguments {closing})*' if several else ""
        names = [f"function_{number}" for number in range(len(calls))]
        functions = [f"{name}: {_function(*call, terminals)}" for name, call in zip(names, calls.items(), strict=True)]
        return [f"body: arguments {closing}{more}", f"arguments: {' | '.join(names)}", *functions]


def _function(name: str, schema: Schema, terminals: Terminals) -> str:
    head = f'\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    return f"{terminals.text(head)} {terminals.json(schema)} {terminals.text('}' + chr(10))}"
