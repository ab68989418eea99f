"""Tasks -> groups: each task is rolled out several times. A failed rollout is data; a fault of ours is raised."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

from art_core.errors import CaptureError, RolloutLost, UpstreamError
from art_core.loop.rollout import Rollout, task_id
from art_core.loop.watchdog import FREE_WORKER, Watchdog
from art_core.runtime.deadlines import TooLate, within
from art_core.runtime.gathering import gather_limited
from art_core.store import Attempt, Store
from art_core.types import Group, RunAgent, Trajectory

ATTEMPTS = 5
"""Machines that one rollout may lose. Then the agent may be what ends them, and the rollout has failed."""
MOST_CONTINUED = 8
"""Rollouts in a chain of continued ones before the agent starts from scratch: a recorded answer may be what ends the process."""
NOT_THE_AGENTS = tuple(error.__name__ for error in (RolloutLost, asyncio.CancelledError, CaptureError, UpstreamError))
"""How stored errors begin that the agent did not cause: its machine was lost, we were stopped, or recording failed."""


@dataclass(frozen=True)
class ResumePlan:
    """What is recorded of one group already; empty for a new group."""

    group_id: str
    finished: Sequence[Trajectory] = ()
    """Part of the group as they are."""
    resumable: Sequence[str] = ()
    """Interrupted rollouts that new ones can continue, each once; most answers first."""


def resume_plans(
    store: Store, key: str | None, tasks: Sequence[Any], size: int, scored_by: str | None = None
) -> list[ResumePlan]:
    """Plan a group of ``size`` rollouts per task, from what earlier calls and processes recorded under the same key.

    Without a key all groups are new. ``scored_by`` names the reward: groups that it has scored keep their rewards.
    """
    if key is None:
        return [ResumePlan(uuid.uuid4().hex) for _ in tasks]
    return [_resume_plan(store, group_id(key, index), task, size, scored_by) for index, task in enumerate(tasks)]


def group_id(key: str, index: int) -> str:
    """Return the id of the group of the task at ``index`` among those collected under ``key``."""
    return f"{key}/{index}"


def finished_trajectories(store: Store, group_id: str) -> list[Trajectory]:
    """Return the rollouts of a group that ended, failed or not; of one that was continued, the last."""
    attempts = store.attempts(group_id)
    continued = {attempt.continues for attempt in attempts}
    ended = [attempt for attempt in attempts if _has_ended(attempt) and attempt.rollout_id not in continued]
    return [store.trajectory(attempt.rollout_id) for attempt in ended]


def _resume_plan(store: Store, group_id: str, task: Any, size: int, scored_by: str | None) -> ResumePlan:
    def read(attempt: Attempt) -> Trajectory:
        return replace(store.trajectory(attempt.rollout_id), task=task)

    attempts = [attempt for attempt in store.attempts(group_id) if attempt.task_id == task_id(task)]
    # However they ended: the group may have been trained, and is then trained again as it was.
    scored = [attempt for attempt in attempts if scored_by is not None and attempt.scored_by == scored_by]
    if len(scored) >= size:
        return ResumePlan(group_id, [read(attempt) for attempt in scored[:size]])
    # A rollout without answers costs nothing to repeat, and its agent may have been fixed. An output that JSON cannot hold is
    # made again from the recorded answers: a reward may look at it.
    ended = [attempt for attempt in attempts if _has_ended(attempt) and attempt.answers and attempt.exact][:size]
    finished = [replace(read(attempt), reward=None, metrics={}, notes={}) for attempt in ended]
    return ResumePlan(group_id, finished, _resumable(attempts, {attempt.rollout_id for attempt in ended}))


def _has_ended(attempt: Attempt) -> bool:
    return attempt.finished and not (attempt.error or "").startswith(NOT_THE_AGENTS)


def _resumable(attempts: Sequence[Attempt], used: set[str]) -> list[str]:
    """Return the rollout with the most answers of every chain of continued rollouts that is not used, most answers first."""
    chains: dict[str | None, list[Attempt]] = {}
    for attempt in attempts:
        chain = chains[attempt.rollout_id] = chains.get(attempt.continues, [])
        chain.append(attempt)
    furthest = [
        max(reversed(chain), key=lambda attempt: attempt.answers)  # among equals the last: it had all earlier answers
        for rollout_id, chain in chains.items()
        if rollout_id == chain[0].rollout_id
        and len(chain) <= MOST_CONTINUED
        and used.isdisjoint(attempt.rollout_id for attempt in chain)
    ]
    return [attempt.rollout_id for attempt in sorted(furthest, key=lambda attempt: attempt.answers, reverse=True)]


@dataclass(frozen=True)
class RolloutBatch:
    """How to roll out tasks."""

    agent: RunAgent
    new_rollout: Callable[..., Rollout]
    """``new_rollout(task, group_id=, continues=)``."""
    gate: AbstractAsyncContextManager[Any]
    """Limits the rollouts under way."""
    to_input: Callable[[Any], Any]
    to_output: Callable[[Any], Any] | None
    timeout: float | None
    """Seconds after which a rollout has failed."""
    on_rollout: Callable[[], None]
    """Called after every finished rollout."""
    watch: Watchdog

    async def groups(self, tasks: Sequence[Any], plans: Sequence[ResumePlan], size: int) -> list[Group]:
        """Return a group of ``size`` trajectories per task."""
        jobs = [functools.partial(self._group, task, plan, size) for task, plan in zip(tasks, plans, strict=True)]
        return await gather_limited(jobs)

    async def _group(self, task: Any, plan: ResumePlan, size: int) -> Group:
        for _ in plan.finished:
            self.on_rollout()
        continued = [*plan.resumable, *[None] * size][: size - len(plan.finished)]
        jobs = [functools.partial(self._trajectory, task, plan.group_id, rollout_id) for rollout_id in continued]
        return Group(task, (*plan.finished, *await gather_limited(jobs)))

    async def _trajectory(self, task: Any, group_id: str, continues: str | None) -> Trajectory:
        """Roll out the task, in a new rollout after each lost machine; only the first can continue an interrupted one."""
        for attempt in range(1, ATTEMPTS + 1):
            # The worker is given up with the lost machine: waiting for another is not part of the agent's time.
            async with AsyncExitStack() as worker:
                with self.watch.doing(FREE_WORKER):
                    await worker.enter_async_context(self.gate)
                rollout = self.new_rollout(task, group_id=group_id, continues=continues if attempt == 1 else None)
                with suppress(RolloutLost):
                    await self._run(rollout, last=attempt == ATTEMPTS)
                    break
        self.on_rollout()
        return rollout.trajectory

    async def _run(self, rollout: Rollout, *, last: bool) -> None:
        """Run the agent in ``rollout``. Raises RolloutLost if its machine was lost and this is not the ``last`` attempt."""
        agent_input = self.to_input(rollout.task)
        with self.watch.doing("", rollout=rollout):
            async with rollout:
                try:
                    running = _call(self.agent, agent_input, rollout)
                    output = await within(running, self.timeout, f"rollout {rollout.rollout_id}")
                except TooLate:
                    rollout.error = f"TimeoutError: not done after {self.timeout:g} seconds"
                except CaptureError:
                    raise  # the set-up's fault, and the same in every rollout
                except RolloutLost as error:
                    if not last:
                        raise
                    rollout.error = f"MachinesLost: {ATTEMPTS} machines were lost with it; the last: {error}"
                except Exception as error:  # noqa: BLE001 - the boundary to the agent: its failures are data
                    rollout.fail(error)
                else:
                    if rollout.error is None:
                        rollout.output = self.to_output(output) if self.to_output else output


async def _call(agent: RunAgent, agent_input: Any, rollout: Rollout) -> Any:
    try:
        return await agent(agent_input, rollout.address)
    except SystemExit as error:  # caught inside the task: outside, it would end the event loop and all other rollouts
        rollout.fail(error)
