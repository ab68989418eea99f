"""``art.pipeline_trainer``: trains on finished rollouts while others are running."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator
from typing import Any

from art_core.errors import ConfigError
from art_openpipe.refused import keep_recent_and_top
from art_openpipe.trajectories import Trajectory, TrajectoryGroup

__all__ = ["PipelineTrainer", "keep_recent_and_top", "make_group_rollout_fn"]

log = logging.getLogger("art_openpipe")
GroupRollout = Callable[..., Awaitable[TrajectoryGroup]]
STATE = "_pipeline_trainer"
"""The key in ``state.json`` with the number of scenarios that have been used."""


def make_group_rollout_fn(single_rollout_fn: Callable[..., Awaitable[Trajectory]], n: int = 4) -> GroupRollout:
    """Return a function that rolls out a group of ``n``; rollouts that fail become the group's exceptions."""

    async def group_rollout(model: Any, scenario: Any, config: Any) -> TrajectoryGroup:
        runs = (single_rollout_fn(model, scenario, config) for _ in range(n))
        return TrajectoryGroup(await asyncio.gather(*runs, return_exceptions=True))

    return group_rollout


class PipelineTrainer:
    """Trains on groups as they finish: ``num_rollout_workers`` produce them, and a step uses at least ``min_batch_size``.

    Groups with calls that were sampled more than ``max_steps_off_policy`` steps ago are dropped, as are groups in which all
    rollouts failed; a warning counts them. ``kwargs`` are keywords of ``backend.train``.
    """

    def __init__(
        self,
        model: Any,
        backend: Any,
        rollout_fn: GroupRollout,
        scenarios: Iterable[Any],
        config: Any = None,
        eval_fn: Callable[..., Awaitable[list[TrajectoryGroup]]] | None = None,
        *,
        num_rollout_workers: int = 16,
        min_batch_size: int = 4,
        max_batch_size: int | None = None,
        max_steps_off_policy: int = 4,
        max_steps: int | None = None,
        eval_every_n_steps: int = 0,
        resume: bool = True,
        **kwargs: Any,
    ) -> None:
        if isinstance(scenarios, AsyncIterable):
            raise ConfigError(
                "PipelineTrainer does not accept an async iterable of scenarios; pass a list or a generator"
            )
        self.model, self.backend, self.rollout_fn, self.config, self.eval_fn = (
            model,
            backend,
            rollout_fn,
            config,
            eval_fn,
        )
        self.scenarios = scenarios
        self.workers, self.least, self.most = num_rollout_workers, min_batch_size, max_batch_size or 10 * min_batch_size
        self.max_steps_off_policy, self.max_steps, self.eval_every = max_steps_off_policy, max_steps, eval_every_n_steps
        self.resume, self.settings = resume, kwargs

    async def train(self) -> None:
        """Train until the scenarios are used up or ``max_steps`` is reached."""
        state = (self.model.read_state() or {}).get(STATE, {}) if self.resume else {}
        source = iter(self.scenarios)
        done = sum(1 for _ in zip(range(state.get("scenarios", 0)), source, strict=False))
        groups: asyncio.Queue[TrajectoryGroup | None] = asyncio.Queue()
        room = asyncio.Semaphore(self.most)  # limits waiting groups, but not the end mark
        making = asyncio.ensure_future(self._make(source, groups, room))
        making.add_done_callback(lambda _: groups.put_nowait(None))
        try:
            over = False
            while not over and (self.max_steps is None or await self.model.get_step() < self.max_steps):
                batch, over = await self._batch(groups, room)
                done += len(batch)
                await self._step(batch, done)
            if over:
                await making  # raises a worker's exception
        finally:
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)

    async def _make(
        self, source: Iterator[Any], groups: asyncio.Queue[TrajectoryGroup | None], room: asyncio.Semaphore
    ) -> None:
        async def work() -> None:
            for scenario in source:
                group = await self.rollout_fn(self.model, scenario, self.config)
                await room.acquire()
                groups.put_nowait(group)

        tasks = [asyncio.ensure_future(work()) for _ in range(self.workers)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _batch(
        self, groups: asyncio.Queue[TrajectoryGroup | None], room: asyncio.Semaphore
    ) -> tuple[list[TrajectoryGroup], bool]:
        """Return the next groups, and whether there are no more after them."""
        batch: list[TrajectoryGroup] = []
        while len(batch) < self.least or (len(batch) < self.most and not groups.empty()):
            group = await groups.get()
            if group is None:
                return batch, True
            room.release()
            batch.append(group)
        return batch, False

    async def _step(self, batch: list[TrajectoryGroup], done: int) -> None:
        step = await self.model.get_step()
        fresh = [group for group in batch if len(group) and not await self._stale(group, step)]
        if len(fresh) < len(batch):
            dropped = len(batch) - len(fresh)
            log.warning("step %d: dropping %d of %d groups, which are stale or failed", step, dropped, len(batch))
        if not fresh:
            return
        await self.backend.train(self.model, fresh, **self.settings)
        self.model.merge_state({STATE: {"scenarios": done}})
        step += 1
        if self.eval_fn is not None and self.eval_every and step % self.eval_every == 0:
            await self.model.log(await self.eval_fn(self.model, step, self.config), split="val")

    async def _stale(self, group: TrajectoryGroup, step: int) -> bool:
        record = self.backend.opened(self.model).record
        choices = [choice for trajectory in group for choice in trajectory.choices()]
        calls = await record.find(choices, strict=True)
        return any(step - call.policy_version > self.max_steps_off_policy for call in calls.values())
