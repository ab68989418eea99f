"""Answers that exercise an agent: every tool once, what a schema asks for, else a text. Knows nothing about who asks.

Tasks are marked, and every answer carries the mark of the task that it answers, so that mixed-up runs show.
"""

from __future__ import annotations

import json
import re
from typing import Any

from art_core.errors import UpstreamError
from art_core.types import JsonDict

MARK = re.compile(r"(?:task|refused)-\d{3}")


def task(number: int) -> str:
    """Return the text of a task that is answered."""
    return f"Please do task-{number:03}."


def refused_task() -> str:
    """Return the text of a task whose every model call is refused."""
    return "Please do refused-000."


def marks(value: Any) -> set[str]:
    """Return the marks of all tasks that a JSON-able value or a text shows."""
    return set(MARK.findall(value if isinstance(value, str) else json.dumps(value, default=str)))


def scripted_reply(request: JsonDict) -> JsonDict:
    """Answer a chat request as a function of it alone.

    Every tool that was offered and not called yet is called once, in turn; a response format is filled in; a forced tool
    is called; else the answer is a text. Raises UpstreamError (400) for the task that is refused.
    """
    found = MARK.search(json.dumps(request["messages"]))
    mark = found.group() if found else "no task"
    if mark.startswith("refused"):
        raise UpstreamError(f"{mark} is refused: this is a test of how failures are told", status=400, code="refused")
    tool = _next_tool(request)
    if tool is not None:
        arguments = json.dumps(example(tool.get("parameters") or {}, mark))
        # As random ones would be: unique in a conversation, and the same wherever the same is asked.
        call_id = f"call_{len(request['messages'])}_{mark.replace('-', '_')}"
        call = {"id": call_id, "type": "function", "function": {"name": tool["name"], "arguments": arguments}}
        return {"content": None, "tool_calls": [call]}
    schema = ((request.get("response_format") or {}).get("json_schema") or {}).get("schema")
    if schema is not None:
        return {"content": json.dumps(example(schema, mark))}
    return {"content": f"answer to {mark}"}


def _next_tool(request: JsonDict) -> JsonDict | None:
    tools = [tool["function"] for tool in request.get("tools") or () if "function" in tool]
    choice = request.get("tool_choice")
    if isinstance(choice, dict) and "function" in choice:
        return next(tool for tool in tools if tool["name"] == choice["function"]["name"])
    if not tools or choice == "none":
        return None
    calls = [call for message in request["messages"] for call in message.get("tool_calls") or ()]
    called = {call.get("function", {}).get("name") for call in calls}
    left = [tool for tool in tools if tool["name"] not in called]
    if left:
        return left[0]
    return tools[-1] if choice == "required" else None


def example(schema: JsonDict, text: str, root: JsonDict | None = None) -> Any:
    """Return a value that a JSON schema of everyday kind accepts; every free string in it is ``text``."""
    root = schema if root is None else root
    if "$ref" in schema:
        target: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        return example(target, text, root)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for combination in ("anyOf", "oneOf", "allOf"):
        if schema.get(combination):
            return example(schema[combination][0], text, root)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {name: example(part, text, root) for name, part in (schema.get("properties") or {}).items()}
    if kind == "array":
        return [example(schema.get("items") or {}, text, root)] * max(1, schema.get("minItems", 1))
    number = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
    return {"integer": number, "number": number, "boolean": True, "null": None}.get(kind, text)
