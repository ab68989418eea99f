"""Ids for the tool calls of APIs that have none, or whose clients drop them."""

from __future__ import annotations

from art_core.types import JsonDict


class ToolCalls:
    """The calls of one conversation. A result belongs to the call with its id, else to the oldest of its name without one."""

    def __init__(self) -> None:
        self._calls = 0
        self._open: list[tuple[str, str]] = []
        """Ids and names of the calls without a result."""

    def add(self, name: str, arguments: str, call_id: str | None) -> JsonDict:
        """Return a call as chat has it."""
        self._calls += 1
        call_id = call_id or f"call_{self._calls}"
        self._open.append((call_id, name))
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def answer(self, name: str | None, call_id: str | None) -> str | None:
        """Return the id of the call that a result belongs to, None if there is none."""
        found = [call for call in self._open if call[0] == call_id]
        found += [call for call in self._open if name is None or call[1] == name]
        if not found:
            return None
        self._open.remove(found[0])
        return found[0][0]
