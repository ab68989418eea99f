"""The parameters of a function one by one, for formats whose arguments are no JSON object. Knows nothing about a format."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from art_core.engine.requests import Schema, refuse
from art_core.types import JsonDict

KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}


class Parameter(NamedTuple):
    """One of a function's parameters."""

    name: str
    schema: Schema
    """With the definitions that it refers to."""
    required: bool
    kinds: frozenset[str]
    """JSON's types that it may have; ``string`` where nothing is said."""


def parameters(name: str, schema: Schema) -> list[Parameter]:
    """Return the parameters of the function ``name``, as its schema lists them.

    Raises UpstreamError 400 where the schema says more of the arguments than what each of them is.
    """
    known = {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
        "title",
        "description",
        "$schema",
    }
    listed = schema.schema.get("properties") or {}
    further = sorted(set(schema.schema) - known)
    if further or (not listed and schema.schema.get("additionalProperties")):
        says = ", ".join(further) or "additionalProperties"
        raise refuse(
            f"the parameters of the tool {name} say {says}, and a call in this model's format gives each parameter by itself; "
            "list them in properties, or do not force the call"
        )
    required = schema.schema.get("required") or ()
    definitions = {key: schema.schema[key] for key in ("$defs", "definitions") if key in schema.schema}
    return [
        Parameter(
            key,
            Schema({**definitions, **value} if isinstance(value, dict) else {}, schema.strict),
            key in required,
            kinds(value, schema.schema),
        )
        for key, value in listed.items()
    ]


def kinds(schema: Any, root: JsonDict, depth: int = 8) -> frozenset[str]:
    """Return the JSON types of the values that ``schema`` describes; ``root`` is what it refers to."""
    return frozenset(_kinds(schema, root, depth)) or frozenset({"string"})


def _kinds(schema: Any, root: JsonDict, depth: int) -> set[str]:
    if not isinstance(schema, dict) or not depth:
        return set()
    said = schema.get("type", ())
    found = {said} if isinstance(said, str) else set(said)
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    found |= {KINDS.get(type(value), "null") for value in values}
    inner = [each for key in ("anyOf", "oneOf", "allOf") for each in schema.get(key, ())]
    reference = schema.get("$ref", "")
    if reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        inner.append(target)
    return found.union(*(_kinds(each, root, depth - 1) for each in inner))


def as_json(text: str, allowed: frozenset[str]) -> str:
    """Return the JSON text of a value that a model wrote as ``text``, for a parameter of the ``allowed`` kinds.

    What fits no other kind is a string. Python's names of constants are taken for JSON's: templates show them so.
    """
    written = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    if allowed != {"string"}:
        try:
            value = json.loads(written, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
        kind = KINDS.get(type(value), "null")
        if kind != "string" and (kind in allowed or (kind == "integer" and "number" in allowed)):
            return written
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
