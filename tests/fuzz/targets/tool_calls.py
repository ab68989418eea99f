"""Text that a model said -> content, thinking and tool calls, in every format that the engine reads (``engine.answer``)."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from art_embedded.answer import Answer, message
from art_embedded.formats import CALLS, Formats
from art_embedded.formats.thinking import THINKING
from fuzz.choices import Choices, spell, spelled

NAMES = sorted(CALLS)
PLACES = ("after", "before", "inside")
THOUGHTS = (None, *sorted({*THINKING.values()}))
AS_WRITTEN = tuple(name for name in NAMES if "pythonic" not in name and not name.endswith(("coder", "xml")))
"""Formats with JSON in them, which is passed on letter for letter."""
STOPS = ((), ("STOP",), ("\n\n", "]"))
SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "share": {"type": "number"},
            "flag": {"type": "boolean"},
            "items": {"type": "array"},
            "inner": {"$ref": "#/$defs/Inner"},
        },
        "$defs": {"Inner": {"type": "object"}},
    }
}
PIECES = (
    "\n", "é", "STOP", '{"name": "f", "arguments": ', '{"name": "f", "parameters": ', '{"text": "a"}',
    '{"count": 3}', "[f(", ")]",
    "<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>", "<tool_call>", "</tool_call>",
    "<longcat_tool_call>",
    "</longcat_tool_call>", "<function=f>", "<function=", "</function>", "<parameter=text>", "<parameter=",
    "</parameter>",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "functools", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "functions.f:0",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>", "\\ud800", "\\u0000", "text='a'", "'", "[" * 200, "{" * 1100, "9" * 5000, "1e999", "NaN",
    "null", "True", "-", "\\",
    "💧", "\u2028", "\x1c", "\xa0",
)  # fmt: skip


def _seed(name: str, text: str, *, thought: int = 0, place: int = 0, stop: int = 0) -> bytes:
    return bytes([NAMES.index(name), thought, place, stop, 2, 3, 9]) + spell(text, PIECES)


SEEDS = [
    _seed("hermes", 'I look\n<tool_call>\n{"name": "f", "arguments": {"text": "a"}}\n</tool_call>\n<tool_call>'),
    _seed("longcat", '<longcat_tool_call>{"name": "f", "arguments": {"count": 3}}</longcat_tool_call>STOP', stop=1),
    _seed("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"text": "a"}}; {"name": "f", "parameters": {}}'),
    _seed("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}"
          "<|tool_call_end|><|tool_calls_section_end|>", thought=1, place=1),
    _seed("deepseek_v31", "<think>a</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
          "<｜tool▁calls▁end｜>", thought=1, place=1),
    _seed("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"text": "a"}, "id": "a"}]'),
    _seed("mistral", '[TOOL_CALLS]f[CALL_ID]x[ARGS]{"text": "a"}[TOOL_CALLS]f{"count": 3}'),
    _seed("phi4_mini_json", 'functools[{"name": "f", "arguments": {"text": "a"}}]'),
    _seed("pythonic", "[f(text='a', count=3, items=[1, {'a': -2.5}], flag=True), f.g()]"),
    _seed("llama4_pythonic", "<|python_start|>[f(text='a')]<|python_end|>"),
    _seed("qwen3_coder",
    "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n<parameter=count>\n3\n</parameter>\n"
          "</function>\n</tool_call>\nmore", thought=1, place=2),
]  # fmt: skip


def one_input(data: bytes) -> None:
    choices = Choices(data)
    name, thinking = choices.pick(NAMES), choices.pick(THOUGHTS)
    place, stop = choices.pick(PLACES), choices.pick(STOPS)
    cuts = [choices.byte() for _ in range(choices.byte() % 8)]
    text = spelled(choices.rest(), PIECES)

    def answer() -> Answer:
        formats = Formats(CALLS[name], thinking)
        return Answer(tools=True, formats=formats, place=place, stop=stop, schemas=SCHEMAS)

    whole = message(answer().feed(text, final=True))
    _check(whole, text, name, bool(thinking), stop)
    for edges in ([0, *sorted({cut for cut in cuts if 0 < cut < len(text)}), len(text)], range(len(text) + 1)):
        if len(text) < 600 or len(edges) < 20:
            streaming = answer()
            deltas = [delta for a, b in pairwise(edges) for delta in streaming.feed(text[a:b])]
            streamed = message([*deltas, *streaming.feed("", final=True)])
            assert _without_ids(streamed) == _without_ids(whole), (name, text, streamed, whole)


def _check(whole: dict[str, Any], text: str, name: str, thinking: bool, stop: tuple[str, ...]) -> None:
    content, thought = whole["content"] or "", whole.get("reasoning_content", "")
    calls = whole.get("tool_calls", ())
    before_stop = text[: min((place for it in stop if (place := text.find(it)) >= 0), default=len(text))]
    assert _within(content, before_stop) and _within(thought, before_stop), "what is told was said, in that order"
    if not calls and not thought and not thinking:
        assert content == before_stop, "what is no call comes back unchanged"
    identifiers = [call["id"] for call in calls]
    assert all(isinstance(it, str) and it for it in identifiers)
    for call in calls:
        function = call["function"]
        assert function["name"] and function["name"].encode()
        assert isinstance(json.loads(function["arguments"]), dict)
        assert json.dumps(call).encode() and function["arguments"].encode()
        if name in AS_WRITTEN:
            assert function["arguments"] in before_stop or function["arguments"] == "{}", "letter for letter"


def _within(part: str, text: str) -> bool:
    """Whether the letters of ``part`` stand in ``text`` in this order."""
    letters = iter(text)
    return all(letter in letters for letter in part)


def _without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    return {**answer, "tool_calls": [call["function"] for call in answer.get("tool_calls", ())]}
