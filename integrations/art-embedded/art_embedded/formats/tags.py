"""Qwen3-Coder and Qwen 3.5: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``.

A value is plain text or JSON, depending on the function's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from art_core.types import JsonDict
from art_embedded.formats.call import (
    Before,
    Read,
    Schemas,
    Terminals,
    ToolCall,
    after_line,
    find_any,
    pattern,
    through,
    unread,
)
from art_embedded.formats.parameters import Parameter, as_json, branches, kinds, parameters, properties, values
from art_embedded.requests import Schema, refuse

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END, PARAMETER_END = "<function=", "</function>", "</parameter>"
VALUE_END = f"\n{PARAMETER_END}\n"
ANY = "(?s:.*)"
HEAD = re.compile(r"\s*(?:<tool_call>\s*)?<function=([^>\s]+)>")
PARAMETER_NAME = re.compile(r"[^>\n]+")
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL)
END = re.compile(r"\s*</function>(?:\s*</tool_call>)?")


class Tags:
    """Parameters between tags."""

    markers = (OPENING, CLOSING)
    openings = (OPENING, FUNCTION)
    """Models sometimes omit the outer tag."""
    begins = ""
    one_batch = False

    def find(self, text: str, before: Before) -> int | None:
        return find_any(text, after_line((*self.openings, CLOSING) if before == "call" else self.openings))

    def read(self, text: str, schemas: Schemas, final: bool) -> Read | None:
        stripped = text.lstrip()
        if stripped.startswith(CLOSING):
            return Read(len(text) - len(stripped) + len(CLOSING), [])
        inner = stripped.removeprefix(OPENING).lstrip()
        if not (inner.startswith(FUNCTION) or FUNCTION.startswith(inner)):
            return through(text, CLOSING, final)
        outer = stripped.startswith(OPENING)
        ends = [FUNCTION_END + r"\s*" + CLOSING] if outer else [FUNCTION_END]
        end = re.search("|".join(ends), text)
        if end is None:
            return unread(text, final)
        call = _call(text[: end.end()], schemas)
        if call is None:
            return through(text, CLOSING if outer else FUNCTION_END, final)
        return Read(end.end(), [call])

    def rules(self, calls: Mapping[str, Schema], several: bool, terminals: Terminals) -> list[str]:
        opening, closing = map(terminals.marker, self.markers)
        rules, names = [], []
        for number, (name, schema) in enumerate(calls.items()):
            listed = parameters(name, schema)
            parts = []
            for index, parameter in enumerate(listed):
                rule = f"function_{number}_{index}"
                value = _value(name, parameter, terminals)
                ends = "[lazy]" if value.startswith("/") else ""
                rules.append(f"{rule}: {terminals.text(f'<parameter={parameter.name}>{chr(10)}')} {rule}_value")
                rules.append(f"{rule}_value{ends}: {value}")
                parts.append(rule if parameter.required else f"{rule}?")
            head, end = terminals.text(f"\n<function={name}>\n"), terminals.text("</function>\n")
            rules.append(f"function_{number}: {head} {' '.join(parts)} {end}")
            names.append(f"function_{number}")
        more = f' ("\\n" {opening} function {closing})*' if several else ""
        return [f"body: function {closing}{more}", f"function: {' | '.join(names)}", *rules]


def _call(text: str, schemas: Schemas) -> ToolCall | None:
    head = HEAD.match(text)
    if head is None:
        return None
    schema, position, arguments = schemas.get(head[1], {}), head.end(), {}
    listed = properties(schema)
    while (each := PARAMETER.match(text, position)) is not None:
        arguments[each[1]] = as_json(each[2], kinds(*branches(listed.get(each[1]), schema)))
        position = each.end()
    if END.fullmatch(text, position) is None:
        return None
    written = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in arguments.items())
    return ToolCall(head[1], "{" + ", ".join(written) + "}")


def _value(name: str, parameter: Parameter, terminals: Terminals) -> str:
    """Return the grammar of one parameter's value and its end tag: JSON, or for a string the plain text."""
    if not PARAMETER_NAME.fullmatch(parameter.name):
        raise refuse(
            f"the parameter {parameter.name!r} of the tool {name} can't be written as a tag, as this model's call format "
            "requires; rename it, or don't force the call"
        )
    strict, end = parameter.schema.strict, terminals.text(VALUE_END)
    texts = [branch for branch in parameter.branches if "string" in kinds(branch)]
    if not texts:
        return f"{terminals.json(parameter.schema)} {end}"
    free = [branch for branch in texts if values(branch) is None]
    if free:
        # Text that looks like another type is parsed as that type, so the grammar for free text covers all types.
        return _text(name, parameter.name, free[0], strict)
    listed = [value for branch in texts for value in values(branch) or ()]
    written = [value if isinstance(value, str) else json.dumps(value) for value in listed]
    rest = [branch for branch in parameter.branches if branch not in texts]
    others = [f"{terminals.json(Schema({**parameter.schema.schema, 'anyOf': rest}, strict))} {end}"] if rest else []
    return " | ".join([*(terminals.text(value + VALUE_END) for value in written), *others])


def _text(function: str, name: str, schema: JsonDict, strict: bool) -> str:
    unsupported = sorted({"pattern", "format"} & set(schema))
    if unsupported and strict:
        raise refuse(
            f"the parameter {name} of the tool {function} has a {unsupported[0]}, which this model's call format can't enforce; "
            "remove it, or set strict to false"
        )
    inner = f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})"
    # Exclude closing tags, which would end the parameter or the call.
    twice = f"{pattern(PARAMETER_END)}{ANY}{pattern(PARAMETER_END)}"
    return f"/{inner}{pattern(VALUE_END)}/ & ~/{ANY}({twice}|{pattern(FUNCTION_END)}){ANY}/"
