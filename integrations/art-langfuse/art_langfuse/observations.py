"""A rollout -> the observations of its trace: the rollout, its nodes, their model calls and tools, in order.

All ids are derived from the rollout's id alone, so sending twice has no effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from art_core.types import Call, JsonDict, Trajectory

Kind = Literal["agent", "generation", "tool"]
SHORTEST = 0.002
"""Shortest duration in seconds, so that servers with millisecond resolution keep the order."""


@dataclass(frozen=True)
class Observation:
    """One node of a trace."""

    kind: Kind
    name: str
    number: int
    """Index in the trace; the rollout itself is 0."""
    parent: int | None
    start: float
    """Unix time."""
    end: float
    call: Call | None = field(default=None, repr=False)
    """Set for a generation."""
    tool: ToolUse | None = None
    """Set for a tool."""


@dataclass(frozen=True)
class ToolUse:
    """A model's tool call, with the result from a later prompt."""

    call_id: str
    name: str
    arguments: Any
    """As written by the model."""
    result: Any


def trace_id(rollout_id: str) -> str:
    """Return the trace's id, 32 hexadecimal digits; the same as ``Langfuse.create_trace_id(seed=rollout_id)``."""
    return hashlib.sha256(rollout_id.encode()).digest()[:16].hex()


def observation_id(rollout_id: str, number: int) -> str:
    """Return the id of an observation, 16 hexadecimal digits."""
    return hashlib.sha256(f"{rollout_id}/{number}".encode()).digest()[:8].hex()


def observations(trajectory: Trajectory, started: float) -> list[Observation]:
    """Return the rollout's observations, each after its parent.

    Consecutive calls of a node form one observation. Calls are recorded in order but without times, so the rollout's seconds are
    divided evenly among calls and tools.
    """
    entries = [entry for index in range(len(trajectory.calls)) for entry in _entries(trajectory.calls, index)]
    slot = max(trajectory.seconds / max(1, len(entries)), SHORTEST)
    nodes = [Observation("agent", "run", 0, None, started, started + max(trajectory.seconds, slot * len(entries)))]
    open_nodes: list[tuple[str, int]] = []
    for index, (path, entry) in enumerate(entries):
        start, end = started + index * slot, started + (index + 1) * slot
        shared = 0
        while shared < min(len(path), len(open_nodes)) and open_nodes[shared][0] == path[shared]:
            shared += 1
        del open_nodes[shared:]
        for name in path[shared:]:
            parent = open_nodes[-1][1] if open_nodes else 0
            open_nodes.append((name, len(nodes)))
            nodes.append(Observation("agent", name, len(nodes), parent, start, end))
        for _, number in open_nodes:
            nodes[number] = replace(nodes[number], end=end)
        parent = open_nodes[-1][1] if open_nodes else 0
        if isinstance(entry, Call):
            nodes.append(Observation("generation", "chat", len(nodes), parent, start, end, call=entry))
        else:
            nodes.append(Observation("tool", entry.name, len(nodes), parent, start, end, tool=entry))
    return nodes


def _entries(calls: Sequence[Call], index: int) -> Iterator[tuple[list[str], Call | ToolUse]]:
    """Yield a call and the tools that ran for it, with the path of the calling node."""
    call = calls[index]
    path = call.agent.split("/") if call.agent else []
    yield path, call
    for tool_call in call.response.get("tool_calls") or ():
        function, call_id = tool_call.get("function") or {}, tool_call.get("id")
        result = _result(calls[index + 1 :], call_id, len(call.request.get("messages") or ()))
        if result is not None:
            tool = ToolUse(str(call_id), str(function.get("name")), function.get("arguments"), result["content"])
            yield path, tool


def _result(later: Sequence[Call], call_id: Any, skip: int) -> JsonDict | None:
    """Return the first later message that answers a tool call, after ``skip`` messages, because ids may be reused."""
    for call in later:
        for message in (call.request.get("messages") or ())[skip:]:
            if message.get("role") == "tool" and message.get("tool_call_id") == call_id:
                return {"content": message.get("content")}
    return None
