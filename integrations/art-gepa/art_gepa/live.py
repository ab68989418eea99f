"""The engine ``live`` with other texts: the agent's own providers are sent them in place of the agent's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from art_core.capture import Exchange, RelayedCall
from art_gepa.components import INSTRUCTIONS
from art_gepa.prompts import Change, Current, replaced

FIELDS = ("system", "instructions", "systemInstruction", "system_instruction")
"""Where providers' APIs have instructions, beside messages with a role."""


class PromptedLive:
    """Makes the live engine whose requests get the changes that a file has at the time."""

    def __init__(self, make: Callable[..., Any], file: Path) -> None:
        self._make, self._current = make, Current(file)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the engine."""
        engine = self._make(*args, **kwargs)
        relay, current = engine.relay, self._current

        async def with_changes(exchange: Exchange, call: RelayedCall) -> None:
            await relay(exchange, replace(call, body=edited_body(call.body, current.changes())))

        engine.relay = with_changes
        return engine


def edited_body(body: bytes, changes: Iterable[Change]) -> bytes:
    """Return a request of any provider's API with the changes; the same bytes if there is nothing to change."""
    changes = tuple(changes)
    if not changes:
        return body
    try:
        request = json.loads(body)
    except ValueError:  # the provider says what is wrong with it
        return body
    prompts = [it for it in changes if it.tool is None]
    described = {(it.tool, it.find): it.replace for it in changes if it.tool is not None}
    edited = _walked(request, prompts, described, False)
    return body if edited == request else json.dumps(edited, ensure_ascii=False).encode()


def _walked(value: Any, prompts: list[Change], described: Mapping[Any, str], instructs: bool) -> Any:
    """Return the value with its texts replaced, if they instruct or describe tools."""
    if isinstance(value, str):
        return replaced(value, prompts) if instructs else value
    if isinstance(value, list):
        return [_walked(it, prompts, described, instructs) for it in value]
    if not isinstance(value, dict):
        return value
    instructs = instructs or value.get("role") in INSTRUCTIONS
    found = {
        name: _walked(it, prompts, described, instructs or name in FIELDS) if name != "arguments" else it
        for name, it in value.items()
    }
    text = described.get((value.get("name"), value.get("description")))
    return found if text is None else {**found, "description": text}
