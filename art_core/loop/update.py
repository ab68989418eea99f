"""One optimizer step, and the swap to the weights that it made."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path

from art_core.errors import NotFiniteError
from art_core.loop import nonfinite_steps
from art_core.loop.sentinel import Sentinel
from art_core.runtime.threads import in_thread
from art_core.serving import ServingProxy
from art_core.store import Store
from art_core.store.run_folder import remove_old
from art_core.types import Learner, Loss, TokenTree, Trajectory, Weights

log = logging.getLogger("art_core.engine.update")  # a child of the logger whose records are displayed


class Updater:
    """Takes the steps of a run in which rollouts may be ``ahead`` so many steps. ``from_files``: the engine only
    accepts weights that have a path."""

    def __init__(
        self, learner: Learner, serving: ServingProxy, store: Store, run_dir: Path, *, ahead: int, from_files: bool
    ) -> None:
        self._learner, self._serving, self._store, self._run_dir = learner, serving, store, run_dir
        self._ahead, self._from_files = ahead, from_files
        score, keep = functools.partial(in_thread, learner.score), functools.partial(store.set_meta, "sentinel")
        self._sentinel = Sentinel(serving.score, score, store.meta("sentinel"), keep)

    async def take_step(
        self, trees: Sequence[TokenTree], trajectories: Sequence[Trajectory], *, loss: Loss | None, step: int
    ) -> dict[str, float]:
        """Take one optimizer step on ``trees``, store what ``step`` was trained on, and serve the new weights.

        Returns the learner's metrics and the sentinel's. If the learner's version stays the same, no step was taken,
        and nothing is stored or swapped. A step with a value that is not finite is dropped: its inputs are kept under
        ``dropped/``, and the metrics are ``dropped`` = 1. Raises StaleWeightsError if the engine then does not serve
        the new weights.
        """
        learner, before = self._learner, self._learner.version
        await self._sentinel.begin(trajectories, before)
        try:
            if loss is None:  # a loss of its own, for imitation, reads neither logprobs nor advantages
                nonfinite_steps.check_inputs(trees, trajectories)
            await in_thread(learner.begin_step, step)
            metrics = await self._step(trees, loss)
            if learner.version != before:
                store = functools.partial(self._store.add_update, targets=metrics.get("targets"))
                await in_thread(store, step, learner.version, trajectories)
                metrics = metrics | await self.swap()
        except NotFiniteError as error:
            if learner.version != before:
                raise
            file = await in_thread(nonfinite_steps.keep, self._run_dir / "dropped", step, before, trajectories, error)
            log.warning(nonfinite_steps.DROPPED, step, error, file)
            metrics = {"dropped": 1.0}
        finally:
            await self._serving.resume()
        return metrics

    async def _step(self, trees: Sequence[TokenTree], loss: Loss | None) -> dict[str, float]:
        # Without rollouts ahead, the served weights may be the very tensors that the step changes, and the engine may
        # leave the GPU to the learner.
        if not self._ahead:
            await self._serving.pause(rest=True)
        step = self._learner.step if loss is None else functools.partial(self._learner.step, loss=loss)
        return await in_thread(step, trees)

    async def swap(self) -> dict[str, float]:
        """Serve the learner's weights, and return the sentinel's metrics. Calls may stay paused."""
        if self._from_files:
            weights = await self._published()
        else:
            # The engine may read live weights at any time: a call that slips in would count as one of the old weights.
            await self._serving.pause()
            weights = await in_thread(self._learner.weights)
            weights = weights if weights.live is not None else await self._published()
        logprobs = await self._serving.swap(weights, self._sentinel.probe)
        return await self._sentinel.check(weights.version, logprobs)

    async def resume(self) -> None:
        """Serve the weights that a run resumes with, checked against its start weights."""
        if self._learner.version:  # else the engine may have any weights until the swap
            await self._sentinel.resume()
        await self.swap()
        await self._serving.resume()

    async def _published(self) -> Weights:
        version, folder = self._learner.version, self._run_dir / "serving"
        weights = await in_thread(self._learner.publish, folder / str(version))
        # Rollouts that began with an older version may still read it, and so may an engine that restarts.
        oldest = version - self._ahead - 2
        for old in folder.iterdir():
            if old.name.isdecimal() and int(old.name) <= oldest:
                remove_old(old)
        return weights
