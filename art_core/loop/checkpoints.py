"""A run's checkpoints: saved with the state of the random generators, thinned out, and the newest intact one restored."""

from __future__ import annotations

import logging
import random
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from art_core.errors import DamagedCheckpoint, StoreError
from art_core.runtime.threads import in_thread
from art_core.store import Store
from art_core.store.run_folder import checkpoint_step, checkpoints, remove_old
from art_core.types import Learner

log = logging.getLogger("art_core.run")

RANDOM = "random/{}"
"""Key in the store's meta of the random states of a step's checkpoint; null once the checkpoint is removed."""


@dataclass(frozen=True)
class Checkpoints:
    """The folders ``checkpoints/step-NNNNNN`` of one run."""

    run_dir: Path
    store: Store
    keep: int | None
    """The number of newest checkpoints to keep, beside the best; None keeps all."""

    def folder(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.run_dir / "checkpoints" / f"step-{step:06d}"

    async def save(self, learner: Learner, step: int, version: int) -> None:
        """Sync the store, write the checkpoint of ``step``, and remove those that are neither among the newest nor the best.

        Raises StoreError if the learner is not at ``version``, which ended that step.
        """
        if learner.version != version:
            raise StoreError(
                f"no checkpoint of step {step}: a step that failed after it has changed the weights (version "
                f"{learner.version} in place of {version}); close the run and open it again to resume from what is saved"
            )
        random_state = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
        self.store.set_meta(RANDOM.format(step), random_state)
        await in_thread(self.store.sync)
        await in_thread(learner.save, self.folder(step))
        if self.keep is not None:
            await in_thread(self._thin_out)

    def _thin_out(self) -> None:
        steps = {checkpoint_step(folder): folder for folder in checkpoints(self.run_dir)}
        best = best_step(self.store, list(steps))
        for step in list(steps)[: -self.keep]:
            if step != best and remove_old(steps[step]):
                self.store.set_meta(RANDOM.format(step), None)

    async def restore(self, learner: Learner) -> int:
        """Restore the newest intact checkpoint and the generators of ``random`` and numpy, and return its step.

        Damaged ones are set aside with a warning. Raises StoreError if none is intact.
        """
        damaged: DamagedCheckpoint | None = None
        for folder in reversed(checkpoints(self.run_dir)):
            try:
                await in_thread(learner.restore, folder)
            except DamagedCheckpoint as error:
                aside = folder.with_name(f"{folder.name}.damaged")
                log.warning("%s; it is kept as %s", error, aside)
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
                damaged = damaged or error
                continue
            step = checkpoint_step(folder)
            if random_state := self.store.meta(RANDOM.format(step)):
                version, numbers, gauss = random_state["python"]
                random.setstate((version, tuple(numbers), gauss))
                np.random.set_state(random_state["numpy"])
            return step
        raise StoreError(
            f"no checkpoint of {self.run_dir} is whole; all are set aside as checkpoints/*.damaged there: {damaged}. Put a copy "
            "back in its place, or train again with this run_dir: it begins with the start weights and reuses stored rollouts"
        ) from damaged


def best_step(store: Store, steps: list[int]) -> int | None:
    """Return the step with the best mean success over its evaluations; of equals the last, None if none was evaluated."""
    successes: dict[int, list[float]] = defaultdict(list)
    for evaluation in store.meta("evaluations", []):
        successes[evaluation["step"]].append(evaluation["success"])
    return max((step for step in steps if step in successes), key=lambda it: (fmean(successes[it]), it), default=None)
