"""Qwen3-Coder and Qwen 3.5: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``.

A value is text as it is, or JSON; the function's schema says which. Knows nothing about other formats.
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
    """Models leave the outer tag out at times."""
    begins = ""
    one_batch = False

    def find(self, text: str, before: Before) -> int | None:
        return find_any(text, after_line((*self.openings, CLOSING) if before == "call" else self.openings))

    def read(self, text: str, schemas: Schemas, final: bool) -> Read | None:
        said = text.lstrip()
        if said.startswith(CLOSING):
            return Read(len(text) - len(said) + len(CLOSING), [])
        inner = said.removeprefix(OPENING).lstrip()
        if not (inner.startswith(FUNCTION) or FUNCTION.startswith(inner)):
            return through(text, CLOSING, final)
        outer = said.startswith(OPENING)
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
            for place, parameter in enumerate(listed):
                rule = f"function_{number}_{place}"
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
    schema, place, found = schemas.get(head[1], {}), head.end(), {}
    listed = properties(schema)
    while (each := PARAMETER.match(text, place)) is not None:
        found[each[1]] = as_json(each[2], kinds(*branches(listed.get(each[1]), schema)))
        place = each.end()
    if END.fullmatch(text, place) is None:
        return None
    written = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in found.items())
    return ToolCall(head[1], "{" + ", ".join(written) + "}")


def _value(name: str, parameter: Parameter, terminals: Terminals) -> str:
    """Return the grammar of one parameter's value with its end: JSON, or for a string the text itself."""
    if not PARAMETER_NAME.fullmatch(parameter.name):
        raise refuse(
            f"the tool {name} has a parameter named {parameter.name!r}, which cannot stand in a tag of this model's calls; "
            "give it another name, or do not force the call"
        )
    strict, end = parameter.schema.strict, terminals.text(VALUE_END)
    texts = [branch for branch in parameter.branches if "string" in kinds(branch)]
    if not texts:
        return f"{terminals.json(parameter.schema)} {end}"
    free = [branch for branch in texts if values(branch) is None]
    if free:
        # It can be a text of any other kind as well: what is written so is read so.
        return _text(name, parameter.name, free[0], strict)
    listed = [value for branch in texts for value in values(branch) or ()]
    written = [value if isinstance(value, str) else json.dumps(value) for value in listed]
    rest = [branch for branch in parameter.branches if branch not in texts]
    others = [f"{terminals.json(Schema({**parameter.schema.schema, 'anyOf': rest}, strict))} {end}"] if rest else []
    return " | ".join([*(terminals.text(value + VALUE_END) for value in written), *others])


def _text(function: str, name: str, schema: JsonDict, strict: bool) -> str:
    unknown = sorted({"pattern", "format"} & set(schema))
    if unknown and strict:
        raise refuse(
            f"the parameter {name} of the tool {function} has a {unknown[0]}, which cannot be followed in the format of "
            "this model's calls; leave it out, or do not demand it with strict"
        )
    inner = f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})"
    # Without the ends of tags in it: the call would be read as if it ended there.
    twice = f"{pattern(PARAMETER_END)}{ANY}{pattern(PARAMETER_END)}"
    return f"/{inner}{pattern(VALUE_END)}/ & ~/{ANY}({twice}|{pattern(FUNCTION_END)}){ANY}/"
