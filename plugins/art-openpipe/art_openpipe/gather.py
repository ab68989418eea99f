"""Many rollouts at a time: groups, single trajectories, batches. Knows nothing about models or training.

A cancellation is never data: whoever is cancelled cancels what it waits for, and raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any

from art_core.runtime.gathering import gather_limited
from art_openpipe.gathering import Budget
from art_openpipe.trajectories import Trajectory, TrajectoryGroup

AfterEach = Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]]


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: int | float = 0,
    max_metrics: int | None = None,
    after_each: AfterEach | None = None,
) -> list[TrajectoryGroup]:
    """Run all groups at the same time and return them in order.

    ``max_exceptions`` rollouts may fail, or below 1 that share of them: they are their group's ``exceptions``; the next one is
    raised, and ends all others. ``after_each`` is given every group as soon as its runs are there, and returns it, others, or
    None, which leaves it out. ``pbar_desc=None`` shows no bar. ``pbar_total_completion_tokens`` changes nothing, as in OpenPipe
    ART, where it is deprecated.
    """
    given = list(groups)
    total = sum(it.awaited or 1 if isinstance(it, TrajectoryGroup) else 1 for it in given)
    budget = Budget(total, allowed=max_exceptions, description=pbar_desc, shown=max_metrics)
    with budget.running():
        found = await gather_limited([_job(it, budget, after_each) for it in given])
    return [group for several in found for group in several]


def _job(
    given: Awaitable[TrajectoryGroup], budget: Budget, after_each: AfterEach | None
) -> Callable[[], Awaitable[Sequence[TrajectoryGroup]]]:
    async def job() -> Sequence[TrajectoryGroup]:
        try:
            group = await given
        except Exception as error:
            if isinstance(given, TrajectoryGroup):
                raise  # its rollouts have been counted
            budget.failed(error)
            return []
        if not isinstance(given, TrajectoryGroup):
            budget.done(sum(it.reward for it in group) / max(1, len(group)), {})
        after = group if after_each is None else await after_each(group)
        return [] if after is None else list(after) if isinstance(after, list | tuple) else [after]

    return job


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory] | Awaitable[Iterable[Trajectory]]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: int | float = 0,
) -> list[Any]:
    """Run all rollouts at the same time and return what each returned, in order; of one that failed within
    ``max_exceptions``, its exception."""
    given = list(trajectories)
    budget = Budget(len(given), allowed=max_exceptions, description=pbar_desc)

    async def one(rollout: Awaitable[Any]) -> Any:
        try:
            found = await rollout
        except Exception as error:  # noqa: BLE001 - the boundary to the script's rollouts
            budget.failed(error)
            return error
        several = [found] if isinstance(found, Trajectory) else list(found)
        budget.done(sum(it.reward for it in several) / max(1, len(several)), several[0].metrics if several else {})
        return found if isinstance(found, Trajectory) else several

    with budget.running():
        return await gather_limited([lambda rollout=rollout: one(rollout) for rollout in given])


async def trajectory_group_batches(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    batch_size: int,
    max_batch_exceptions: int | float = 0,
    max_concurrent_batches: int = 4,
    skip_batches: int = 0,
    pbar_desc: str | None = "batches",
) -> AsyncIterator[list[TrajectoryGroup]]:
    """Yield lists of ``batch_size`` groups in order, the last may be shorter, while up to ``max_concurrent_batches`` run."""
    source = iter(groups)
    for skipped in islice(source, skip_batches * batch_size):
        if hasattr(skipped, "close"):  # a group, or a coroutine
            skipped.close()
    running: list[asyncio.Task[list[TrajectoryGroup]]] = []

    def gather_next() -> Coroutine[Any, Any, list[TrajectoryGroup]] | None:
        batch = list(islice(source, batch_size))
        return (
            gather_trajectory_groups(batch, pbar_desc=pbar_desc, max_exceptions=max_batch_exceptions) if batch else None
        )

    try:
        while True:
            while len(running) < max_concurrent_batches and (batch := gather_next()) is not None:
                running.append(asyncio.ensure_future(batch))
            if not running:
                return
            yield await running.pop(0)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
