"""Applies prompt changes to the requests that the engine ``live`` relays to the agent's own providers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from art_core.capture import Exchange, Refused, RelayedCall
from art_core.types import JsonDict
from art_gepa.prompts import Current, Edits, Fixed, Prompted

INSTRUCTIONS = ("system", "instructions")
"""Fields with instructions in providers' requests, in addition to messages with a role. Gemini's contain parts."""
GEMINI = ("systemInstruction", "system_instruction")


class PromptedLive:
    """A factory of the live engine, with the changes of ``source`` applied to its requests."""

    def __init__(self, make: Callable[..., Any], source: Fixed | Current) -> None:
        self._make, self._source = make, source

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the engine."""
        engine = self._make(*args, **kwargs)
        relay, source = engine.relay, self._source

        async def with_changes(exchange: Exchange, call: RelayedCall) -> None:
            if isinstance(
                exchange.dialect, Prompted
            ):  # the relay records the changed body, so no change is applied twice
                exchange.dialect = exchange.dialect.inner
            body = edited_body(call.body, source)
            if body is not call.body and exchange.headers.get("authorization", "").startswith("AWS4-"):
                raise Refused(
                    "the request's signature covers its text, so its prompts can't be replaced here; change them in the agent",
                    status=400,
                    code="signed",
                )
            await relay(exchange, replace(call, body=body))

        engine.relay = with_changes
        return engine


def edited_body(body: bytes, source: Fixed | Current) -> bytes:
    """Return a provider's request with the changes applied; the same object if nothing changes."""
    edits = source.edits()
    try:
        request = json.loads(body)
    except ValueError:  # the provider will report it
        return body
    if not isinstance(request, dict):
        return body
    edited = _edited(request, edits)
    source.note(request, edited)
    return body if edited == request else json.dumps(edited).encode()


def _edited(request: JsonDict, edits: Edits) -> JsonDict:
    """Apply the changes to every field for instructions and tools that a provider's API has."""
    edited = edits.in_chat(request)
    if isinstance(request.get("input"), list):
        edited["input"] = edits.in_messages(request["input"])
    for name in INSTRUCTIONS:
        if name in request:
            edited[name] = edits.in_content(request[name])
    for name in GEMINI:
        if isinstance(request.get(name), dict) and "parts" in request[name]:
            edited[name] = {**request[name], "parts": edits.in_content(request[name]["parts"])}
    if isinstance(edited.get("tools"), list):
        edited["tools"] = [_tool(tool, edits) for tool in edited["tools"]]
    if isinstance(config := request.get("toolConfig"), dict) and isinstance(config.get("tools"), list):
        edited["toolConfig"] = {**config, "tools": [_tool(tool, edits) for tool in config["tools"]]}
    return edited


def _tool(tool: Any, edits: Edits) -> Any:
    """Return a tool with its description replaced, in the shape of any API."""
    if not isinstance(tool, dict):
        return tool
    tool = edits.in_function(tool)
    if "toolSpec" in tool:
        tool = {**tool, "toolSpec": edits.in_function(tool["toolSpec"])}
    for name in ("functionDeclarations", "function_declarations"):
        if isinstance(tool.get(name), list):
            tool = {**tool, name: [edits.in_function(it) for it in tool[name]]}
    return tool
