"""How templates write calls, format by format: the other way round than the engine reads them."""

from __future__ import annotations

import json
from collections.abc import Callable

Calls = list[tuple[str, dict]]


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: Calls) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": {dumps(name)}, "arguments": {dumps(given)}}}\n</tool_call>' for name, given in calls
    )


def llama(calls: Calls) -> str:
    return "; ".join(f'{{"name": {dumps(name)}, "parameters": {dumps(given)}}}' for name, given in calls)


def kimi(calls: Calls) -> str:
    each = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumps(given)}<|tool_call_end|>"
        for index, (name, given) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"


def deepseek(calls: Calls) -> str:
    each = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(given)}<｜tool▁call▁end｜>" for name, given in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def listed(calls: Calls) -> str:
    return dumps([{"name": name, "arguments": given} for name, given in calls])


def python(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(python, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {python(each)}" for key, each in value.items()) + "}"
    return repr(value)


def pythonic(calls: Calls) -> str:
    each = [f"{name}({', '.join(f'{key}={python(value)}' for key, value in given.items())})" for name, given in calls]
    return f"[{', '.join(each)}]"


def tags(calls: Calls) -> str:
    each = []
    for name, given in calls:
        values = {key: value if isinstance(value, str) else dumps(value) for key, value in given.items()}
        inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        each.append(f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>")
    return "\n".join(each)


WRITTEN: dict[str, tuple[str, Callable[[Calls], str]]] = {
    "hermes": ("hermes", hermes),
    "llama3_json": ("llama3_json", llama),
    "llama3_json with its tag": ("llama3_json", lambda calls: "<|python_tag|>" + llama(calls)),
    "kimi_k2": ("kimi_k2", kimi),
    "deepseek_v31": ("deepseek_v31", deepseek),
    "mistral": ("mistral", lambda calls: "[TOOL_CALLS] " + listed(calls)),
    "mistral, named": ("mistral", lambda calls: "".join(f"[TOOL_CALLS]{name}{dumps(given)}" for name, given in calls)),
    "mistral, newer": (
        "mistral",
        lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(given)}" for name, given in calls),
    ),
    "phi4_mini_json": ("phi4_mini_json", lambda calls: "functools" + listed(calls)),
    "pythonic": ("pythonic", pythonic),
    "llama4_pythonic": ("llama4_pythonic", lambda calls: f"<|python_start|>{pythonic(calls)}<|python_end|>"),
    "qwen3_coder": ("qwen3_coder", tags),
}
"""A form of a format -> the format's name, and what writes calls in it."""
BEGIN = ("llama3_json", "pythonic", "llama4_pythonic")
"""Formats whose calls are the whole answer."""
