"""Tasks -> groups: each task is rolled out several times. A failed rollout is data; a fault of ours is raised."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

from art_core.errors import CaptureError, RolloutLost, TooLate, failure_of
from art_core.loop.resume_plans import ResumePlan
from art_core.loop.rollout import Rollout
from art_core.loop.watchdog import FREE_WORKER, Watchdog
from art_core.runtime.deadlines import within
from art_core.runtime.gathering import gather_limited
from art_core.types import Group, RunAgent, Trajectory

MAX_LOST_MACHINES = 5
"""Machines that one rollout may lose before it counts as failed: its agent may be what crashes them."""


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
        for attempt in range(1, MAX_LOST_MACHINES + 1):
            # The worker is given up with the lost machine: waiting for another is not part of the agent's time.
            async with AsyncExitStack() as worker:
                with self.watch.doing(FREE_WORKER):
                    await worker.enter_async_context(self.gate)
                rollout = self.new_rollout(task, group_id=group_id, continues=continues if attempt == 1 else None)
                with suppress(RolloutLost):
                    await self._run(rollout, last=attempt == MAX_LOST_MACHINES)
                    break
        self.on_rollout()
        return rollout.trajectory

    async def _run(self, rollout: Rollout, *, last: bool) -> None:
        """Run the agent in ``rollout``. Raises RolloutLost if its machine was lost and this is not the ``last`` attempt."""
        agent_input = self.to_input(rollout.task)
        with self.watch.doing("", rollout=rollout):
            async with rollout:
                try:
                    call = self._call(agent_input, rollout)
                    rollout.output = await within(call, self.timeout, f"rollout {rollout.rollout_id}")
                except TooLate:
                    rollout.error = f"TimeoutError: not done after {self.timeout:g} seconds"
                except CaptureError:
                    raise  # the set-up's fault, and the same in every rollout
                except RolloutLost as error:
                    if not last:
                        raise
                    rollout.error = f"MachinesLost: {MAX_LOST_MACHINES} machines were lost with it; the last: {error}"
                except BaseException as error:  # noqa: BLE001 - the boundary to the agent: its failures are data
                    rollout.fail(failure_of(error))

    async def _call(self, agent_input: Any, rollout: Rollout) -> Any:
        try:
            output = await self.agent(agent_input, rollout.address)
            return self.to_output(output) if self.to_output else output
        except SystemExit as error:
            rollout.fail(error)  # inside the task: outside, it would end the event loop and all other rollouts
