"""Workers as the place where a run's agents run: the ``executor`` of a run. Knows nothing about sockets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from art_core.types import ExecutorBase, RolloutAddress, RunAgent
from art_server.gate import Gate
from art_server.roster import TrainingServer


@dataclass(frozen=True)
class Assignment:
    """Stands for the agent that the workers of a pool have."""

    pool: str = "default"
    on_end: Callable[[], None] = lambda: None
    """Called after every run that a worker ended."""


class Workers(ExecutorBase):
    """The executor of a run whose agents run on the workers of ``roster``."""

    def __init__(self, roster: TrainingServer) -> None:
        self._roster = roster

    def adapt(self, agent: object) -> RunAgent:
        """Return what lets a worker run its agent; ``agent`` is an ``Assignment``, or None for the workers of any machine."""
        return RemoteAgent(self._roster, agent if isinstance(agent, Assignment) else Assignment())

    def gate(self, agent: object) -> Gate:
        """A rollout, and its time limit, begins when a worker has a place for it."""
        return self._roster.gate(agent.pool if isinstance(agent, Assignment) else Assignment().pool)


class RemoteAgent:
    """Runs a worker's agent."""

    def __init__(self, roster: TrainingServer, assignment: Assignment) -> None:
        self._roster, self._assignment = roster, assignment

    async def __call__(self, given: Any, address: RolloutAddress) -> Any:
        """Return what the agent returned; raise what it raised, by its name."""
        rollout = {
            "rollout_id": address.rollout_id,
            "model": address.model,
            "passthrough": sorted(address.passthrough),
            "nodes": address.nodes,
        }
        body = {"episode_id": address.rollout_id, "input": given, "rollout": rollout}
        result = await self._roster.run(body, self._assignment.pool)
        self._assignment.on_end()
        if result.get("error") is not None:
            raise _raised(result["error"])
        return result.get("output")


def _raised(error: str) -> Exception:
    """Return an exception that is described as ``error``: what it was on the worker."""
    name, colon, text = error.partition(": ")
    kind = name if name.isidentifier() else "AgentFailed"
    return type(kind, (Exception,), {})(text if kind == name and colon else "" if kind == name else error)
