"""Tasks -> groups: every run of the agent in a rollout of its own. Knows nothing about rewards or learning."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from art_core.errors import CaptureError, RolloutLost, UpstreamError
from art_core.gathering import gather_limited
from art_core.rollout import Rollout, run_once
from art_core.store import Store
from art_core.types import Group, RolloutAddress, RunAgent, Trajectory

ATTEMPTS = 5
"""Of one run whose machine is lost each time: then the agent may be what ends them, and the run has failed."""
UNFINISHED = tuple(it.__name__ for it in (RolloutLost, asyncio.CancelledError, CaptureError, UpstreamError))
"""How errors begin in the store that are none of the agent's: its machine was lost, we were stopped, or it could not be
recorded."""


@dataclass(frozen=True)
class Kept:
    """The groups that are collected under a key."""

    store: Store
    key: str

    def group_id(self, place: int) -> str:
        """Return the name of the group of the task at ``place``."""
        return f"{self.key}/{place}"

    def finished(self, place: int) -> list[Trajectory]:
        """Return the runs of that task that need not be made again."""
        found = self.store.rollouts(group=self.group_id(place))
        done = [it.rollout_id for it in found if it.finished and not (it.error or "").startswith(UNFINISHED)]
        return [self.store.trajectory(rollout_id) for rollout_id in done]


@dataclass(frozen=True)
class Runs:
    """How an agent is run on a task."""

    agent: RunAgent
    to_input: Callable[[Any], Any]
    to_output: Callable[[Any], Any] | None
    timeout: float | None
    """Seconds until a run counts as failed."""
    on_rollout: Callable[[], None]
    """Called after every finished run."""

    async def groups(
        self,
        tasks: Sequence[Any],
        begin: Callable[..., Rollout],
        *,
        size: int,
        gate: AbstractAsyncContextManager[Any],
        kept: Kept | None = None,
    ) -> list[Group]:
        """Return a group of ``size`` trajectories per task; ``begin(task, group_id=)`` makes a rollout, ``gate`` limits them."""
        found: list[list[Trajectory]] = [[] for _ in tasks]
        if kept:
            found = await asyncio.to_thread(lambda: [kept.finished(place)[:size] for place in range(len(tasks))])
        jobs: list[Callable[[], Awaitable[Trajectory]]] = []
        for place, (task, done) in enumerate(zip(tasks, found, strict=True)):
            again = functools.partial(begin, task, group_id=kept.group_id(place) if kept else uuid.uuid4().hex)
            jobs += [functools.partial(self.one, again, gate)] * (size - len(done))
        made = iter(await gather_limited(jobs))
        return [
            Group(task, (*done, *(next(made) for _ in range(size - len(done)))))
            for task, done in zip(tasks, found, strict=True)
        ]

    async def one(self, begin: Callable[[], Rollout], gate: AbstractAsyncContextManager[Any]) -> Trajectory:
        """Run the agent once, in a new rollout for every machine that is lost; each waits for a place of its own."""
        for attempt in range(1, ATTEMPTS + 1):
            run = self.agent if attempt < ATTEMPTS else self._last
            async with gate:  # left with the lost machine: the time until there is another is not the agent's
                rollout = begin()
                given = self.to_input(rollout.task)
                try:
                    await run_once(rollout, run, given, timeout=self.timeout, to_output=self.to_output)
                except RolloutLost:
                    continue  # with all that the agent had said so far: another begins anew
            break
        self.on_rollout()
        return rollout.trajectory

    async def _last(self, given: Any, address: RolloutAddress) -> Any:
        """Run the agent where there is no further attempt: a lost machine is then its failure, and data."""
        try:
            return await self.agent(given, address)
        except RolloutLost as error:
            raise MachinesLost(f"{ATTEMPTS} machines were lost with it; the last: {error}") from error


class MachinesLost(Exception):
    """How a run failed whose machine was lost at every attempt."""
