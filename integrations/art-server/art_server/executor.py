"""The ``executor`` of a run whose agents run on workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from art_core.types import ExecutorBase, RolloutAddress, RunAgent
from art_server.gate import Gate
from art_server.roster import TrainingServer


@dataclass(frozen=True)
class Assignment:
    """Stands for the agent of a pool's workers."""

    pool: str = "default"
    on_end: Callable[[], None] = lambda: None
    """Called after every rollout that a worker finished."""


class Workers(ExecutorBase):
    """Runs agents on the workers of ``roster``."""

    def __init__(self, roster: TrainingServer) -> None:
        self._roster = roster

    def adapt(self, agent: object) -> RunAgent:
        """Return a function that lets a worker run its agent; ``agent`` is an ``Assignment``, anything else means the default."""
        return RemoteAgent(self._roster, agent if isinstance(agent, Assignment) else Assignment())

    def gate(self, agent: object) -> Gate:
        """Return what rollouts wait for, a free worker; their time starts afterwards."""
        pool = agent.pool if isinstance(agent, Assignment) else Assignment().pool
        self._roster.warn_without_worker(pool)
        return self._roster.gate(pool)


class RemoteAgent:
    """Calls a worker's agent."""

    def __init__(self, roster: TrainingServer, assignment: Assignment) -> None:
        self._roster, self._assignment = roster, assignment

    async def __call__(self, task: Any, address: RolloutAddress) -> Any:
        """Return the agent's output, or raise its exception as one of the same name."""
        rollout = {
            "rollout_id": address.rollout_id,
            "model": address.model,
            "passthrough": sorted(address.passthrough),
            "nodes": address.nodes,
        }
        body = {"episode_id": address.rollout_id, "input": task, "rollout": rollout}
        result = await self._roster.run(body, self._assignment.pool)
        self._assignment.on_end()
        if result.get("error") is not None:
            raise _raised(result["error"])
        return result.get("output")


def _raised(error: str) -> Exception:
    """Return an exception with the description ``error``, as on the worker."""
    name, colon, text = error.partition(": ")
    kind = name if name.isidentifier() else "AgentFailed"
    return type(kind, (Exception,), {})(text if kind == name and colon else "" if kind == name else error)
