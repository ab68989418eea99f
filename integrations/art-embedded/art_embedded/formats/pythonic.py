"""Calls in Python syntax: ``[f(a=1), g(b="x")]`` as the whole answer. Parsed, never evaluated."""

from __future__ import annotations

import ast
import json
import keyword
import re
import warnings
from collections.abc import Mapping
from typing import Any

from art_embedded.formats.call import Before, Read, Schemas, Terminals, ToolCall, held_back, unread
from art_embedded.formats.parameters import parameters
from art_embedded.requests import Schema, refuse

FIRST = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.]*\s*(?:\(|\Z)|\Z)|\Z)")
END = re.compile(r"\)\s*\]")
STRUCTURE = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\[({\])}'"]""", re.DOTALL)
"""Strings, and outside of strings: brackets, and the opening quote of an unterminated string."""
CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's constants, which models write as well."""


class Pythonic:
    """A list of calls at the start of the answer, optionally between ``start`` and ``end``."""

    openings = ()
    begins = r"\s*\[\s*[A-Za-z_]"
    one_batch = True

    def __init__(self, start: str = "", end: str = "") -> None:
        self.markers = (start, end) if start else ()
        self._start, self._end = start, end

    def find(self, text: str, before: Before) -> int | None:
        stripped = text.lstrip()
        if before == "call":
            return text.index(stripped) if self._end and stripped and self._ends(stripped) else None
        if before == "text":
            return None
        if self._start and held_back(stripped, [self._start]) == len(stripped):
            return 0
        return 0 if FIRST.match(stripped.removeprefix(self._start)) else None

    def _ends(self, text: str) -> bool:
        return text.startswith(self._end) or self._end.startswith(text)

    def read(self, text: str, schemas: Schemas, final: bool) -> Read | None:
        if self._end and text.startswith(self._end):
            return Read(len(self._end), [])
        start = text.find("[")
        end = _end(text, start) if start >= 0 and END.search(text, start) else None
        return unread(text, final) if end is None else Read(end, _calls(text[start:end]) or None)

    def rules(self, calls: Mapping[str, Schema], several: bool, terminals: Terminals) -> list[str]:
        functions = [rule for number, call in enumerate(calls.items()) for rule in _function(number, *call, terminals)]
        names = " | ".join(f"function_{number}" for number in range(len(calls)))
        more = ' (", " call)*' if several else ""
        return [f'body: "[" call{more} "]"', f"call: {names}", *functions]


def _end(text: str, start: int) -> int | None:
    """Return the end of the list that begins at ``start``; None if it is incomplete."""
    depth = 0
    for each in STRUCTURE.finditer(text, start):
        if each[0] in ("'", '"'):
            return None
        depth += (each[0] in "[({") - (each[0] in "])}")
        if not depth:
            return each.end()
    return None


def _calls(text: str) -> list[ToolCall] | None:
    """Return the calls in a list of calls; None if ``text`` isn't one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes in strings
            parsed = ast.parse(text, mode="eval").body
        return [_call(each) for each in parsed.elts] if isinstance(parsed, ast.List) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # malformed, not literals, or nested too deeply
        return None


def _call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("not a call with keyword arguments only")
    arguments = {each.arg: _value(each.value) for each in node.keywords}
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    # JSON escapes of characters beyond 16 bits are surrogate pairs, which Python reads as two characters.
    return ToolCall(_name(node.func), written.encode("utf-16", "surrogatepass").decode("utf-16"))


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("not a name")
    return node.id


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=each):
            return [_value(item) for item in each]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            pairs = zip(map(_value, keys), map(_value, values), strict=True)
            return {key if isinstance(key, str) else json.dumps(key): value for key, value in pairs}
    raise ValueError("not a JSON value")


def _function(number: int, name: str, schema: Schema, terminals: Terminals) -> list[str]:
    """Return the rules of a call of one function: parameters in order, optional ones may be omitted, separated by commas."""
    listed = parameters(name, schema)
    words = [*name.split("."), *(parameter.name for parameter in listed)]
    if invalid := [word for word in words if not word.isidentifier() or not word.isascii() or keyword.iskeyword(word)]:
        raise refuse(
            f"the tool {name} can't be called in this model's format, which is Python syntax: {invalid[0]!r} isn't a valid name; "
            "rename it, or don't force the call"
        )
    rule = f"function_{number}"
    rules = [f'{rule}: {terminals.text(name + "(")} {rule}_first_0 ")"']
    for index, parameter in enumerate(listed):
        value, after = f"{rule}_value_{index}", f"{rule}_next_{index + 1}"
        first = [f"{value} {after}"] + ([] if parameter.required else [f"{rule}_first_{index + 1}"])
        following = [f'", " {value} {after}'] + ([] if parameter.required else [after])
        rules.append(f"{rule}_first_{index}: {' | '.join(first)}")
        rules.append(f"{rule}_next_{index}: {' | '.join(following)}")
        rules.append(f"{value}: {terminals.text(parameter.name + '=')} {terminals.json(parameter.schema)}")
    return [*rules, f'{rule}_first_{len(listed)}: ""', f'{rule}_next_{len(listed)}: ""']
