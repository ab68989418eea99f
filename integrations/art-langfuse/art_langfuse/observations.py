"""A run of the agent -> the observations of its trace: the run, its nodes, their model calls and tools, in order.

Pure; knows nothing about Langfuse, OpenTelemetry or how they name things. A run's ids follow from its rollout's id alone, so what
is sent twice is there once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from art_core.types import Call, JsonDict, Trajectory

Kind = Literal["agent", "generation", "tool"]
SHORTEST = 0.002
"""Seconds: who keeps milliseconds keeps the order too."""


@dataclass(frozen=True)
class Observation:
    """One node of a trace."""

    kind: Kind
    name: str
    number: int
    """Its place in the trace; the run itself is 0."""
    parent: int | None
    start: float
    """Unix time."""
    end: float
    call: Call | None = field(default=None, repr=False)
    """Of a generation."""
    tool: ToolUse | None = None
    """Of a tool."""


@dataclass(frozen=True)
class ToolUse:
    """A tool that a model asked for, with the result that a later call shows."""

    call_id: str
    name: str
    arguments: Any
    """As the model wrote them."""
    result: Any


def trace_id(rollout_id: str) -> str:
    """Return the trace's id: 32 hexadecimal digits, those of ``Langfuse.create_trace_id(seed=rollout_id)``."""
    return hashlib.sha256(rollout_id.encode()).digest()[:16].hex()


def observation_id(rollout_id: str, number: int) -> str:
    """Return the id of an observation: 16 hexadecimal digits."""
    return hashlib.sha256(f"{rollout_id}/{number}".encode()).digest()[:8].hex()


def observations(trajectory: Trajectory, started: float) -> list[Observation]:
    """Return the run's observations, each after its parent.

    A node is one observation for as long as its calls follow each other. Calls are recorded in order but without their times, so
    the run's seconds are shared out evenly among calls and tools, so that they stand in order.
    """
    entries = [entry for index in range(len(trajectory.calls)) for entry in _entries(trajectory.calls, index)]
    slot = max(trajectory.seconds / max(1, len(entries)), SHORTEST)
    found = [Observation("agent", "run", 0, None, started, started + max(trajectory.seconds, slot * len(entries)))]
    open_nodes: list[tuple[str, int]] = []
    for place, (path, entry) in enumerate(entries):
        start, end = started + place * slot, started + (place + 1) * slot
        shared = 0
        while shared < min(len(path), len(open_nodes)) and open_nodes[shared][0] == path[shared]:
            shared += 1
        del open_nodes[shared:]
        for name in path[shared:]:
            parent = open_nodes[-1][1] if open_nodes else 0
            open_nodes.append((name, len(found)))
            found.append(Observation("agent", name, len(found), parent, start, end))
        for _, number in open_nodes:
            found[number] = replace(found[number], end=end)
        parent = open_nodes[-1][1] if open_nodes else 0
        if isinstance(entry, Call):
            found.append(Observation("generation", "chat", len(found), parent, start, end, call=entry))
        else:
            found.append(Observation("tool", entry.name, len(found), parent, start, end, tool=entry))
    return found


def _entries(calls: Sequence[Call], index: int) -> Iterator[tuple[list[str], Call | ToolUse]]:
    """Yield a call and the tools that it had run, with the path of the node that called."""
    call = calls[index]
    path = call.agent.split("/") if call.agent else []
    yield path, call
    for asked in call.response.get("tool_calls") or ():
        function = asked.get("function") or {}
        result = _result(calls[index + 1 :], asked.get("id"), len(call.request.get("messages") or ()))
        if result is not None:
            yield (
                path,
                ToolUse(str(asked.get("id")), str(function.get("name")), function.get("arguments"), result["content"]),
            )


def _result(later: Sequence[Call], call_id: Any, shown: int) -> JsonDict | None:
    """Return the first message that answers a tool call, among those that came after the ``shown`` ones: ids may come again."""
    for call in later:
        for message in (call.request.get("messages") or ())[shown:]:
            if message.get("role") == "tool" and message.get("tool_call_id") == call_id:
                return {"content": message.get("content")}
    return None
