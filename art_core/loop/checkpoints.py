"""A run's checkpoints: save them with the random state, remove old ones, restore the newest intact one."""

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
"""Key in the store's meta of the random state saved with a step's checkpoint; null once the checkpoint is removed."""


@dataclass(frozen=True)
class Checkpoints:
    """The folders ``checkpoints/step-NNNNNN`` of one run."""

    run_dir: Path
    store: Store
    keep: int | None
    """The number of newest checkpoints to keep, besides the best; None keeps all."""

    def folder(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / f"step-{step:06d}"

    async def save(self, learner: Learner, step: int, version: int) -> None:
        """Sync the store, write the checkpoint of ``step``, and remove those that are neither among the newest nor the best.

        Raises StoreError if the learner isn't at ``version``, the one at the end of that step.
        """
        if learner.version != version:
            raise StoreError(
                f"can't save a checkpoint of step {step}: a later step failed after it changed the weights (version "
                f"{learner.version} instead of {version}); close the run and open it again to resume from the last checkpoint"
            )
        random_state = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
        self.store.set_meta(RANDOM.format(step), random_state)
        await in_thread(self.store.sync)
        await in_thread(learner.save, self.folder(step))
        if self.keep is not None:
            await in_thread(self._remove_old)

    def _remove_old(self) -> None:
        steps = {checkpoint_step(folder): folder for folder in checkpoints(self.run_dir)}
        best = best_step(self.store, list(steps))
        for step in list(steps)[: -self.keep]:
            if step != best and remove_old(steps[step]):
                self.store.set_meta(RANDOM.format(step), None)

    async def restore(self, learner: Learner) -> int:
        """Restore the newest intact checkpoint and the random state of Python and numpy, and return its step.

        Damaged ones are renamed, with a warning. Raises StoreError if none is intact.
        """
        newest_error: DamagedCheckpoint | None = None
        for folder in reversed(checkpoints(self.run_dir)):
            try:
                await in_thread(learner.restore, folder)
            except DamagedCheckpoint as error:
                aside = folder.with_name(f"{folder.name}.damaged")
                log.warning("%s; it is renamed to %s", error, aside)
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
                newest_error = newest_error or error
                continue
            step = checkpoint_step(folder)
            if random_state := self.store.meta(RANDOM.format(step)):
                version, numbers, gauss = random_state["python"]
                random.setstate((version, tuple(numbers), gauss))
                np.random.set_state(random_state["numpy"])
            return step
        raise StoreError(
            f"no checkpoint of {self.run_dir} is intact; all are renamed to checkpoints/*.damaged there: {newest_error}. Restore "
            "one from a copy, or train again with this run_dir: it begins with the start weights and reuses stored rollouts"
        ) from newest_error


def best_step(store: Store, steps: list[int]) -> int | None:
    """Return the step with the best mean success over its evaluations, the last of equal ones; None if none was evaluated."""
    successes: dict[int, list[float]] = defaultdict(list)
    for evaluation in store.meta("evaluations", []):
        successes[evaluation["step"]].append(evaluation["success"])
    evaluated = [step for step in steps if step in successes]
    return max(evaluated, key=lambda step: (fmean(successes[step]), step), default=None)
