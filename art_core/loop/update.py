"""One optimizer step and the swap to the weights that it made. Knows nothing about which groups are worth a step."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from art_core.errors import NotFiniteError
from art_core.loop import nonfinite_steps as dropped
from art_core.loop.sentinel import Sentinel
from art_core.runtime.threads import in_thread
from art_core.serving import Door
from art_core.store import Store
from art_core.store.run_folder import remove_old
from art_core.types import Learner, Loss, TokenTree, Trajectory, Weights

log = logging.getLogger("art_core.engine.update")  # below the name whose records a person is shown


@dataclass
class Updates:
    """Takes the steps of one run."""

    learner: Learner
    door: Door
    store: Store
    sentinel: Sentinel
    run_dir: Path
    in_turns: bool
    """Whether nothing is sampled while a step is taken. Calls are then held back meanwhile: what is served may be the very
    weights that the step changes, and the engine may have left the GPU to the learner."""
    from_files: bool
    """Whether the engine only takes weights that have a path."""
    kept: int
    """Written versions that may still be read: by rollouts that began with them, or by an engine that starts anew."""

    async def take(
        self, trees: Sequence[TokenTree], trajectories: Sequence[Trajectory], *, loss: Loss | None, step: int
    ) -> dict[str, float]:
        """Take one optimizer step on ``trees``, note what it was given as that of ``step``, and serve the new weights.

        Returns the learner's metrics and the sentinel's; where the learner's version stayed, no step was taken, and nothing
        is noted or swapped. A step with a value that is not finite is dropped: what it was given is kept under ``dropped/``, and
        the metrics are ``dropped`` = 1. Raises StaleWeightsError where the engine does not serve the new weights then.
        """
        learner, door, before = self.learner, self.door, self.learner.version
        take: Callable[..., dict[str, float]] = (
            learner.step if loss is None else functools.partial(learner.step, loss=loss)
        )
        await self.sentinel.begin(trajectories, before)
        try:
            if loss is None:  # a loss of its own, for imitation, reads neither logprobs nor advantages
                dropped.check_given(trees, trajectories)
            metrics = await self._step(take, trees)
            if learner.version != before:
                note = functools.partial(self.store.add_update, targets=metrics.get("targets"))
                await in_thread(note, step, learner.version, trajectories)
                await self.swap()
                metrics = metrics | await self.sentinel.check(learner.version)
        except NotFiniteError as error:
            if learner.version != before:
                raise
            kept = await in_thread(dropped.keep, self.run_dir / "dropped", step, before, trajectories, error)
            log.warning(dropped.SAID, step, error, kept)
            metrics = {"dropped": 1.0}
        finally:
            await door.resume()
        return metrics

    async def _step(self, take: Callable[..., dict[str, float]], trees: Sequence[TokenTree]) -> dict[str, float]:
        if not self.in_turns:
            return await in_thread(take, trees)
        await self.door.pause()
        await self.door.rest()
        try:
            return await in_thread(take, trees)
        finally:
            await self.door.wake()

    async def swap(self) -> None:
        """Serve the learner's weights."""
        if self.from_files:
            return await self.door.load(await self._written())
        # Before calls go on: the engine may read these weights at any time, and one call that slipped in would be answered
        # by new weights and counted as the old ones'.
        await self.door.pause()
        weights = await in_thread(self.learner.weights)
        await self.door.load(weights if weights.live is not None else await self._written())

    async def go_on(self) -> None:
        """Serve the weights that a run goes on with, checked against those that it was begun with."""
        if self.learner.version:  # else the engine may have any weights until the swap
            await self.sentinel.going_on()
        await self.swap()
        await self.sentinel.resumed(self.learner.version)
        await self.door.resume()

    async def _written(self) -> Weights:
        version = self.learner.version
        weights = await in_thread(self.learner.publish, self.run_dir / "serving" / str(version))
        for old in (self.run_dir / "serving").iterdir():
            if old.name.isdecimal() and int(old.name) <= version - self.kept:
                remove_old(old)
        return weights


def updates(learner: Learner, door: Door, store: Store, run_dir: Path, *, ahead: int, from_files: bool) -> Updates:
    """Return what takes the steps of a run in which rollouts may run ``ahead`` so many steps."""
    score = getattr(learner, "score", None)

    async def learnt(ids: Sequence[int]) -> list[float] | None:
        return None if score is None else await in_thread(score, ids)

    keep = functools.partial(store.set_meta, "sentinel")
    sentinel = Sentinel(door.score, learnt, store.meta("sentinel"), keep)
    return Updates(learner, door, store, sentinel, run_dir, in_turns=not ahead, from_files=from_files, kept=ahead + 2)
