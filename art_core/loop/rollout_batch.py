"""Tasks -> groups: every run of the agent in a rollout of its own. Knows nothing about rewards or learning."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from art_core.errors import CaptureError, RolloutLost, UpstreamError
from art_core.loop.rollout import Rollout, run_once, task_id
from art_core.loop.watchdog import PLACE, Watchdog
from art_core.runtime.gathering import gather_limited
from art_core.store import Attempt, Store
from art_core.types import Group, RolloutAddress, RunAgent, Trajectory

ATTEMPTS = 5
"""Of one run whose machine is lost each time: then the agent may be what ends them, and the run has failed."""
UNFINISHED = tuple(it.__name__ for it in (RolloutLost, asyncio.CancelledError, CaptureError, UpstreamError))
"""How errors begin in the store that are none of the agent's: its machine was lost, we were stopped, or it could not be
recorded."""


MOST_ATTEMPTS = 8
"""Processes that may end with one run of the agent going on before it is begun anew: what was answered in it may be what ends
them."""


@dataclass(frozen=True)
class Kept:
    """The groups that are collected under a key, and what is left of them by processes that ended."""

    store: Store
    key: str
    reward: str | None = None
    """The reward that will score them, by its name: what it has scored already needs no scoring."""

    def group_id(self, place: int) -> str:
        """Return the name of the group of the task at ``place``."""
        return f"{self.key}/{place}"

    def finished(self, place: int) -> list[Trajectory]:
        """Return the runs of the task at ``place`` that came to an end, whatever it was; each run of the agent once."""
        tried = self.store.attempts(self.group_id(place))
        made_again = {it.continues for it in tried}
        ended = [it for it in tried if _came_to_its_end(it) and it.rollout_id not in made_again]
        return [self.store.trajectory(it.rollout_id) for it in ended]

    def left(self, place: int, task: Any, size: int) -> tuple[list[Trajectory], list[str]]:
        """Return the runs of the task at ``place`` that need not be made again, up to ``size`` of them, and the rollouts that
        others can go on from."""
        tried = [it for it in self.store.attempts(self.group_id(place)) if it.task_id == task_id(task)]
        # Whatever a run came to: with its score it is part of a group that may have been trained, and is trained so again.
        scored = [it for it in tried if self.reward is not None and it.scored_by == self.reward]
        if len(scored) >= size:
            return [self._trajectory(it, task) for it in scored[:size]], []
        # A run that made no call costs nothing to make again, and its agent may have been mended since. A reward may look at
        # what JSON cannot say: then the agent is run again, with the same answers.
        usable = [it for it in tried if _came_to_its_end(it) and it.answers and it.exact][:size]
        runs = [replace(self._trajectory(it, task), reward=None, metrics={}, notes={}) for it in usable]
        return runs, _to_go_on(tried, {it.rollout_id for it in usable})

    def _trajectory(self, attempt: Attempt, task: Any) -> Trajectory:
        return replace(self.store.trajectory(attempt.rollout_id), task=task)


def _came_to_its_end(attempt: Attempt) -> bool:
    return attempt.finished and not (attempt.error or "").startswith(UNFINISHED)


def _to_go_on(tried: Sequence[Attempt], used: Collection[str]) -> list[str]:
    """Return the rollout with the most answers of every run of the agent of which none is ``used``, most answers first."""
    runs: dict[str, list[Attempt]] = {}
    first = {it.rollout_id: it.rollout_id for it in tried}
    for it in tried:
        first[it.rollout_id] = first.get(it.continues or "", it.rollout_id)
        runs.setdefault(first[it.rollout_id], []).append(it)
    open_ = [run for run in runs.values() if len(run) <= MOST_ATTEMPTS and not {it.rollout_id for it in run} & used]
    # Of equals the last: it was given what the others have.
    furthest = [max(reversed(run), key=lambda it: it.answers) for run in open_]
    return [it.rollout_id for it in sorted(furthest, key=lambda it: -it.answers)]


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
    watch: Watchdog

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
        left: list[tuple[list[Trajectory], list[str]]] = [([], []) for _ in tasks]
        if kept:
            left = await asyncio.to_thread(lambda: [kept.left(place, task, size) for place, task in enumerate(tasks)])
        jobs: list[Callable[[], Awaitable[Trajectory]]] = []
        for place, (task, (done, open_)) in enumerate(zip(tasks, left, strict=True)):
            again = functools.partial(begin, task, group_id=kept.group_id(place) if kept else uuid.uuid4().hex)
            going_on = [*open_, *[None] * size][: size - len(done)]
            jobs += [functools.partial(self.one, again, gate, rollout_id) for rollout_id in going_on]
            for _ in done:
                self.on_rollout()
        made = iter(await gather_limited(jobs))
        return [
            Group(task, (*done, *(next(made) for _ in range(size - len(done)))))
            for task, (done, _) in zip(tasks, left, strict=True)
        ]

    async def one(
        self, begin: Callable[..., Rollout], gate: AbstractAsyncContextManager[Any], continues: str | None = None
    ) -> Trajectory:
        """Run the agent once, in a new rollout for every machine that is lost; each waits for a place of its own. The first
        ``continues`` one that was cut off."""
        for attempt in range(1, ATTEMPTS + 1):
            run = self.agent if attempt < ATTEMPTS else self._last
            async with _watched(
                gate, self.watch
            ):  # left with the lost machine: the time until there is another is not the agent's
                rollout = begin(continues=continues if attempt == 1 else None)
                given = self.to_input(rollout.task)
                try:
                    with self.watch.doing("", rollout=rollout):
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


@asynccontextmanager
async def _watched(gate: AbstractAsyncContextManager[Any], watch: Watchdog) -> AsyncIterator[None]:
    """``gate``, with the wait for a place watched."""
    async with AsyncExitStack() as stack:
        with watch.doing(PLACE):
            await stack.enter_async_context(gate)
        yield


class MachinesLost(Exception):
    """How a run failed whose machine was lost at every attempt."""
