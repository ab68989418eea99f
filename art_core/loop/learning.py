"""The learner of a run: optimizer steps, the weights that they made, and checkpoints, one at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from art_core.loop.checkpoints import Checkpoints
from art_core.loop.setup import Setup
from art_core.loop.update import Updater
from art_core.loop.watchdog import Watchdog
from art_core.runtime.threads import in_thread
from art_core.serving import ServingProxy
from art_core.store import Store
from art_core.store.run_folder import checkpoints
from art_core.types import Learner, LearnerBase, with_defaults


class Learning:
    """Loads the learner at first use. Hold ``lock`` during a step, so that steps run one at a time."""

    def __init__(self, setup: Setup, store: Store, serving: ServingProxy, watch: Watchdog) -> None:
        self._setup, self._store, self._serving, self._watch = setup, store, serving, watch
        self._checkpoints = Checkpoints(setup.run_dir, store, setup.config.keep_checkpoints)
        self.lock = asyncio.Lock()
        self._learner: Any = None
        self.step = 0
        """Steps done, those that taught nothing included."""
        self.version = 0
        """The learner's version after the last of them. If it has another, a failed step has changed its weights."""
        self._saved: int | None = None
        """The step of the newest checkpoint."""

    @property
    def loaded(self) -> bool:
        """Whether there is a learner."""
        return self._learner is not None

    async def load(self) -> Learner:
        """Return the learner, which is loaded at the first call."""
        if self._learner is None:
            loading = in_thread(self._setup.load_learner)
            learner = await self._watch.during("the learner to load the model", loading)
            self._learner = with_defaults(learner, LearnerBase)
            self.version = learner.version
            self.updater = Updater(
                self._learner, self._serving, self._store, self._setup.run_dir,
                ahead=self._setup.config.max_staleness, from_files=self._setup.engine.loads_files,
            )  # fmt: skip
            self._store.set_meta("learner", type(learner).__name__)
        return self._learner

    async def resume(self) -> None:
        """Restore the newest checkpoint, if there is one, and serve its weights."""
        saved = bool(checkpoints(self._setup.run_dir))
        # A server that outlives us may have what a learner made in a process that ended before its first checkpoint.
        if saved or (self._setup.engine.loads_files and self._store.meta("learner")):
            learner = await self.load()
            if saved:
                self.step = self._saved = await self._checkpoints.restore(learner)
                self.version = learner.version
            await self.updater.resume()

    async def checkpoint_if_due(self) -> None:
        """Note the version that the last step ended with, and save a checkpoint every ``checkpoint_every`` steps."""
        if self.loaded:
            self.version = self._learner.version
            if self.step % self._setup.config.checkpoint_every == 0:
                await self.checkpoint()

    async def checkpoint(self) -> Path:
        """Save a checkpoint of the last step, once, and return its folder."""
        step = self.step
        if self._saved != step:
            learner = await self.load()
            saving = self._checkpoints.save(learner, step, self.version)
            await self._watch.during(f"the checkpoint of step {step} to be written", saving)
            self._saved = step
        return self._checkpoints.folder(step)

    async def close(self) -> None:
        """Save a checkpoint of the last finished step, unless a later one has changed the weights, and close the learner."""
        async with self.lock:
            try:
                if self.step and self.loaded and self._learner.version == self.version:
                    await self.checkpoint()
            finally:
                if self.loaded and isinstance(self._setup.learner, str):  # an object belongs to the caller
                    await in_thread(self._learner.close)
