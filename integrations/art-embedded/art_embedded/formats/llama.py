"""Llama 3: ``{"name": ..., "parameters": {...}}`` as the whole answer, several of them separated by ``; ``.

With or without ``<|python_tag|>`` before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from art_embedded.formats.call import Before, Read, Schemas, Terminals, ToolCall, held_back, unread
from art_embedded.formats.json_text import call_in, decode
from art_embedded.requests import Schema

TAG = "<|python_tag|>"
FIRST = re.compile(r"\s*(?:<\|python_tag\|>\s*)?(?:\{|\Z)")
NEXT = re.compile(r"\s*(?:;\s*)?(?:\{|\Z)")


class Llama:
    """JSON at the start of the answer."""

    markers = (TAG,)
    openings = ()
    begins = r"\s*(\{|<\|python_tag\|>)"
    one_batch = True

    def find(self, text: str, before: Before) -> int | None:
        if before == "text":
            return None
        if before == "call":
            return 0 if NEXT.match(text) else None
        held = held_back(text, [TAG])
        return 0 if FIRST.match(text) or (held and not text[: len(text) - held].strip()) else None

    def read(self, text: str, schemas: Schemas, final: bool) -> Read | None:
        start = text.find("{")
        if start < 0:
            return unread(text, final)
        decoded = decode(text, start)
        if decoded is None:
            return unread(text, final)
        call = call_in(text[start : decoded[1]], "parameters", "arguments")
        return Read(decoded[1], None if call is None else [ToolCall(*call)])

    def rules(self, calls: Mapping[str, Schema], several: bool, terminals: Terminals) -> list[str]:
        names = [f"function_{number}" for number in range(len(calls))]
        functions = [f"{name}: {_function(*call, terminals)}" for name, call in zip(names, calls.items(), strict=True)]
        more = ' ("; " call)*' if several else ""
        return [f"body: call{more}", f"call: {' | '.join(names)}", *functions]


def _function(name: str, schema: Schema, terminals: Terminals) -> str:
    head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": '
    return f"{terminals.text(head)} {terminals.json(schema)} {terminals.text('}')}"
