"""The parameters of a function one by one, for formats whose arguments are no JSON object. Knows nothing about a format."""

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
    """With the definitions that it refers to."""
    required: bool
    branches: list[JsonDict]
    """The schemas of which its value has one, each of one JSON type."""


def parameters(name: str, schema: Schema) -> list[Parameter]:
    """Return the parameters of the function ``name``, as its schema lists them.

    Raises UpstreamError 400 where the schema says more of the arguments than what each of them is.
    """
    root = schema.schema
    known = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema", *DEFINITIONS}
    listed, required = properties(root), root.get("required") or []
    if listed != (root.get("properties") or {}) or not isinstance(required, list):
        raise refuse(
            f"the parameters of the tool {name} are no JSON schema: properties is an object, required is a list"
        )
    further = sorted(set(root) - known)
    if further or (not listed and root.get("additionalProperties")):
        says = ", ".join(further) or "additionalProperties"
        raise refuse(
            f"the parameters of the tool {name} say {says}, and a call in this model's format gives each parameter by itself; "
            "list them in properties, or do not force the call"
        )
    return [
        Parameter(key, with_definitions(value, schema), key in required, branches(value, root))
        for key, value in listed.items()
    ]


def properties(schema: Any) -> JsonDict:
    """Return the schemas of the parameters by name; none where ``schema`` is no JSON schema of an object.

    A tool's schema is checked only where its grammar is wanted. Elsewhere what is wrong in it is as if it were not there.
    """
    listed = schema.get("properties") if isinstance(schema, dict) else None
    return listed if isinstance(listed, dict) else {}


def with_definitions(part: Any, schema: Schema) -> Schema:
    """Return a part of ``schema`` as a schema that can stand alone."""
    kept = {key: schema.schema[key] for key in DEFINITIONS if key in schema.schema}
    return Schema({**kept, **part} if isinstance(part, dict) else {}, schema.strict)


def branches(schema: Any, root: JsonDict, depth: int = 8) -> list[JsonDict]:
    """Return the schemas that ``schema`` leaves to choose from; ``root`` is what it refers to."""
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
            return [found for each in schema[key] for found in branches(each, root, depth - 1)]
    said = schema.get("type")
    return [{**schema, "type": kind} for kind in said] if isinstance(said, list) else [schema]


def values(branch: JsonDict) -> list[Any] | None:
    """Return the values that a schema lists; None where it lists none."""
    listed = [branch["const"]] if "const" in branch else branch.get("enum")
    return listed if isinstance(listed, list) else None


def kinds(*found: JsonDict) -> frozenset[str]:
    """Return the JSON types of the values that some branches describe; ``string`` where nothing is said."""
    said = {branch["type"] for branch in found if isinstance(branch.get("type"), str)}
    said |= {
        KINDS.get(type(value), "null") for branch in found if "type" not in branch for value in values(branch) or ()
    }
    return frozenset(said or {"string"})


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
