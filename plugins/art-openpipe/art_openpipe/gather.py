"""Runs many rollouts concurrently. A cancellation is never a failed rollout: it cancels everything, and is raised."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import TYPE_CHECKING, Any

from art_core.plugin_api import gather_limited
from art_openpipe.types import LocalServingUnavailableError

if TYPE_CHECKING:
    from art_openpipe.trajectories import Trajectory, TrajectoryGroup


async def gather_trajectory_groups(
    groups: Iterable[Awaitable[TrajectoryGroup]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: int | float = 0,
    max_metrics: int | None = None,
    after_each: Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup | list[TrajectoryGroup] | None]] | None = None,
) -> list[TrajectoryGroup]:
    """Run all groups concurrently and return them in order.

    Up to ``max_exceptions`` rollouts (below 1: that share of them) may fail, and become their group's ``exceptions``; the next
    failure is raised and cancels all others. ``after_each`` is called with every group as soon as it is finished, and returns
    that group, a list of groups, or None to drop it. ``pbar_desc=None`` hides the progress bar.
    """
    awaitables = list(groups)
    total = sum(getattr(each, "awaited", 0) or 1 for each in awaitables)
    budget = Budget(total, allowed=max_exceptions, description=pbar_desc, shown=max_metrics)

    async def run(awaitable: Awaitable[TrajectoryGroup]) -> list[TrajectoryGroup]:
        counts_itself = hasattr(awaitable, "awaited")  # a TrajectoryGroup
        group = await (awaitable if counts_itself else _counted(awaitable, budget))
        if isinstance(group, Exception):
            return []
        result = group if after_each is None else await after_each(group)
        return [] if result is None else list(result) if isinstance(result, list | tuple) else [result]

    with budget.running():
        results = await gather_limited([lambda each=each: run(each) for each in awaitables])
    return [group for result in results for group in result]


async def gather_trajectories(
    trajectories: Iterable[Awaitable[Trajectory] | Awaitable[Iterable[Trajectory]]],
    *,
    pbar_desc: str | None = "gather",
    max_exceptions: int | float = 0,
) -> list[Any]:
    """Run all rollouts concurrently and return their results in order; a tolerated failure (see ``gather_trajectory_groups``)
    is returned as its exception."""
    rollouts = list(trajectories)
    budget = Budget(len(rollouts), allowed=max_exceptions, description=pbar_desc)
    with budget.running():
        return await gather_limited([lambda each=each: _counted(each, budget) for each in rollouts])


async def _counted(rollout: Awaitable[Any], budget: Budget) -> Any:
    """Return a trajectory, a group or a list of trajectories, or the exception that was raised instead."""
    try:
        result = await rollout
    except Exception as error:  # noqa: BLE001 - the script's rollouts may raise anything
        budget.failed(error)
        return error
    members = [result] if hasattr(result, "reward") else list(result)
    mean_reward = sum(trajectory.reward for trajectory in members) / max(1, len(members))
    budget.done(mean_reward, members[0].metrics if members else {})
    return result if hasattr(result, "reward") or hasattr(result, "trajectories") else members


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
    running: list[asyncio.Future[list[TrajectoryGroup]]] = []
    try:
        while True:
            while len(running) < max_concurrent_batches and (batch := list(islice(source, batch_size))):
                gathering = gather_trajectory_groups(batch, pbar_desc=pbar_desc, max_exceptions=max_batch_exceptions)
                running.append(asyncio.ensure_future(gathering))
            if not running:
                return
            yield await running.pop(0)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class Budget:
    """Tolerates ``allowed`` failures and raises the next one. Below 1, ``allowed`` is a share of ``total``."""

    def __init__(
        self, total: int = 0, *, allowed: float = 0, description: str | None = None, shown: int | None = None
    ) -> None:
        from tqdm.auto import tqdm

        self._allowed = allowed * total if 0 < allowed < 1 else allowed
        self._failures, self._shown = 0, shown
        self._sums: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._bar = tqdm(desc=description, total=total, disable=description is None)

    @staticmethod
    def current() -> Budget:
        """Return the budget of the current gathering; without one, a new budget that raises the first failure."""
        return _current.get() or Budget()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this budget current in the block, and in the tasks that it starts."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self._bar.close()

    def done(self, reward: float, metrics: Mapping[str, float]) -> None:
        """Count a finished rollout."""
        self._sums.update({"reward": reward, **metrics})
        self._counts.update(["reward", *metrics])
        names = list(self._sums)[: self._shown]
        self._bar.set_postfix({name: self._sums[name] / self._counts[name] for name in names}, refresh=False)
        self._bar.update(1)

    def failed(self, error: Exception) -> None:
        """Count a failure; raise it if it is one too many, or if every further rollout would fail."""
        self._failures += 1
        self._bar.update(1)
        if self._failures > self._allowed or isinstance(error, LocalServingUnavailableError):
            raise error


_current: ContextVar[Budget | None] = ContextVar("art_openpipe_budget", default=None)
