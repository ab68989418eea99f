"""Reads a function's parameters from its schema, for formats that don't write arguments as one JSON object."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from art_core.types import JsonDict
from art_embedded.requests import Schema, refuse

KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}

DEFINITIONS = ("$defs", "definitions")


class Parameter(NamedTuple):
    """One of a function's parameters."""

    name: str
    schema: Schema
    """Includes the definitions that it refers to."""
    required: bool
    branches: list[JsonDict]
    """The alternative schemas of the value, each of one JSON type."""


def parameters(name: str, schema: Schema) -> list[Parameter]:
    """Return the parameters of the function ``name`` in the order of its schema.

    Raises UpstreamError 400 if the schema has constraints beyond the individual parameters.
    """
    root = schema.schema
    known = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema", *DEFINITIONS}
    listed, required = properties(root), root.get("required") or []
    if listed != (root.get("properties") or {}) or not isinstance(required, list):
        raise refuse(
            f"the parameters of the tool {name} aren't a JSON schema: properties must be an object and required a list"
        )
    unsupported = sorted(set(root) - known)
    if unsupported or (not listed and root.get("additionalProperties")):
        keywords = ", ".join(unsupported) or "additionalProperties"
        raise refuse(
            f"the parameters of the tool {name} use {keywords}, but this model's call format writes each parameter separately; "
            "list all parameters in properties, or don't force the call"
        )
    return [
        Parameter(key, with_definitions(value, schema), key in required, branches(value, root))
        for key, value in listed.items()
    ]


def properties(schema: Any) -> JsonDict:
    """Return parameter name -> schema; empty if ``schema`` isn't the schema of an object.

    A tool's schema is only checked if its grammar is needed; otherwise, invalid parts are ignored.
    """
    listed = schema.get("properties") if isinstance(schema, dict) else None
    return listed if isinstance(listed, dict) else {}


def with_definitions(part: Any, schema: Schema) -> Schema:
    """Return a part of ``schema`` as a self-contained schema."""
    definitions = {key: schema.schema[key] for key in DEFINITIONS if key in schema.schema}
    return Schema({**definitions, **part} if isinstance(part, dict) else {}, schema.strict)


def branches(schema: Any, root: JsonDict, depth: int = 8) -> list[JsonDict]:
    """Return the alternatives of ``schema``; references are resolved in ``root``."""
    if not isinstance(schema, dict) or not depth:
        return [{}]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part) if isinstance(target, dict) else None
        return branches(target, root, depth - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            return [branch for each in schema[key] for branch in branches(each, root, depth - 1)]
    types = schema.get("type")
    return [{**schema, "type": kind} for kind in types] if isinstance(types, list) else [schema]


def values(branch: JsonDict) -> list[Any] | None:
    """Return the values that a schema lists (const or enum), or None."""
    listed = [branch["const"]] if "const" in branch else branch.get("enum")
    return listed if isinstance(listed, list) else None


def kinds(*alternatives: JsonDict) -> frozenset[str]:
    """Return the JSON types that the alternatives allow; ``string`` if they don't specify any."""
    types = {branch["type"] for branch in alternatives if isinstance(branch.get("type"), str)}
    untyped = [branch for branch in alternatives if "type" not in branch]
    types |= {KINDS.get(type(value), "null") for branch in untyped for value in values(branch) or ()}
    return frozenset(types or {"string"})


def as_json(text: str, allowed: frozenset[str]) -> str:
    """Return the JSON text of a value that a model wrote as ``text``, for a parameter of the ``allowed`` types.

    A value that fits no other type is a string. Python's constants are read as JSON's, because templates render them so.
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
    raise ValueError(f"{constant} isn't JSON")
