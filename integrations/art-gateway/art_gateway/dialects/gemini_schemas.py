"""Google's schemas, a part of OpenAPI's, as JSON Schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from art_gateway.dialects.reading import camel

RENAMED = {"defs": "$defs", "ref": "$ref"}
DROPPED = ("nullable", "propertyOrdering", "example")
UNSPECIFIED = "TYPE_UNSPECIFIED"


def json_schema(schema: Any) -> Any:
    """Return a schema in JSON Schema's words; what isn't a schema unchanged."""
    if not isinstance(schema, dict):
        return schema
    schema = camel(schema)
    found = {
        RENAMED.get(name, name): CONVERTED[name](value) if name in CONVERTED else value
        for name, value in schema.items()
        if name not in DROPPED and value != UNSPECIFIED
    }
    if schema.get("nullable") and isinstance(found.get("type"), str):
        found["type"] = [found["type"], "null"]
    elif schema.get("nullable") and isinstance(found.get("anyOf"), list):
        found["anyOf"].append({"type": "null"})
    return found


def _each(schemas: Any) -> Any:
    if isinstance(schemas, list):
        return [json_schema(schema) for schema in schemas]
    return {name: json_schema(schema) for name, schema in schemas.items()} if isinstance(schemas, dict) else schemas


def _lower(name: Any) -> Any:
    return name.lower() if isinstance(name, str) else name


def _number(value: Any) -> Any:
    # Google writes 64-bit integers as text.
    return int(value) if isinstance(value, str) and value.isdecimal() else value


CONVERTED: dict[str, Callable[[Any], Any]] = {
    "type": _lower,
    **dict.fromkeys(("properties", "defs", "anyOf"), _each),
    **dict.fromkeys(("items", "additionalProperties"), json_schema),
    **{f"{end}{what}": _number for end in ("min", "max") for what in ("Items", "Length", "Properties")},
}
