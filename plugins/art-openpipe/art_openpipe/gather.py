"""Runs many rollouts concurrently: groups, single trajectories, batches.

A cancellation never counts as a failed rollout: it cancels everything that is running, and is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any

from art_core.plugin_api import gather_limited
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
    """Run all groups concurrently and return them in order.

    Up to ``max_exceptions`` rollouts (below 1: that share of them) may fail, and become their group's ``exceptions``; the next
    failure is raised and cancels all others. ``after_each`` is called with every group as soon as it is finished, and returns
    that group, a list of groups, or None to drop it. ``pbar_desc=None`` hides the progress bar. ``pbar_total_completion_tokens``
    has no effect, as in OpenPipe ART, where it is deprecated.
    """
    awaitables = list(groups)
    total = sum(each.awaited or 1 if isinstance(each, TrajectoryGroup) else 1 for each in awaitables)
    budget = Budget(total, allowed=max_exceptions, description=pbar_desc, shown=max_metrics)
    with budget.running():
        results = await gather_limited([_job(each, budget, after_each) for each in awaitables])
    return [group for result in results for group in result]


def _job(
    awaitable: Awaitable[TrajectoryGroup], budget: Budget, after_each: AfterEach | None
) -> Callable[[], Awaitable[Sequence[TrajectoryGroup]]]:
    async def job() -> Sequence[TrajectoryGroup]:
        try:
            group = await awaitable
        except Exception as error:
            if isinstance(awaitable, TrajectoryGroup):
                raise  # its rollouts have counted their failures themselves
            budget.failed(error)
            return []
        if not isinstance(awaitable, TrajectoryGroup):
            budget.done(sum(trajectory.reward for trajectory in group) / max(1, len(group)), {})
        result = group if after_each is None else await after_each(group)
        return [] if result is None else list(result) if isinstance(result, list | tuple) else [result]

    return job


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory] | Awaitable[Iterable[Trajectory]]],
    *,
    pbar_desc: str | None = "gather",
    pbar_total_completion_tokens: bool = False,
    max_exceptions: int | float = 0,
) -> list[Any]:
    """Run all rollouts concurrently and return their results in order; a tolerated failure (see ``gather_trajectory_groups``)
    is returned as its exception."""
    rollouts = list(trajectories)
    budget = Budget(len(rollouts), allowed=max_exceptions, description=pbar_desc)

    async def run(rollout: Awaitable[Any]) -> Any:
        try:
            result = await rollout
        except Exception as error:  # noqa: BLE001 - the script's rollouts may raise anything
            budget.failed(error)
            return error
        members = [result] if isinstance(result, Trajectory) else list(result)
        mean_reward = sum(trajectory.reward for trajectory in members) / max(1, len(members))
        budget.done(mean_reward, members[0].metrics if members else {})
        return result if isinstance(result, Trajectory) else members

    with budget.running():
        return await gather_limited([lambda rollout=rollout: run(rollout) for rollout in rollouts])


async def trajectory_group_batches(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    batch_size: int,
    max_batch_exceptions: int | float = 0,
    max_concurrent_batches: int = 4,
    skip_batches: int = 0,
    pbar_desc: str | None = "batches",
) -> AsyncIterator[list[TrajectoryGroup]]:
    """Yield lists of ``batch_size`` groups in order, while up to ``max_concurrent_batches`` run; the last may be shorter."""
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
