"""A run's checkpoints: saved with the state of the random generators, thinned out, and the newest whole one taken up again.

Knows nothing about what a learner writes into one (``learner/checkpoint.py``), or about when they are made.
"""

from __future__ import annotations

import logging
import random
import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from art_core.errors import DamagedCheckpoint, StoreError
from art_core.runtime.threads import in_thread
from art_core.store import Store
from art_core.store.run_folder import checkpoint_step, checkpoints, remove_old
from art_core.types import Learner

log = logging.getLogger("art_core.run")

RANDOM = "random/{}"
"""Where the store has the random states that belong to the checkpoint of a step; null where it is gone."""


@dataclass(frozen=True)
class Checkpoints:
    """The folders ``checkpoints/step-NNNNNN`` of one run."""

    run_dir: Path
    store: Store
    keep: int | None
    """Of the newest; None keeps all."""

    def folder(self, step: int) -> Path:
        """Return where the checkpoint of ``step`` is."""
        return self.run_dir / "checkpoints" / f"step-{step:06d}"

    async def save(self, learner: Learner, step: int, version: int) -> None:
        """Write the checkpoint of ``step``, with all that the store has been given before it on the disk, and drop what is
        neither among the newest nor the best.

        ``version`` is the learner's at the end of that step; raises StoreError where it has another.
        """
        if learner.version != version:
            raise StoreError(
                f"no checkpoint of step {step}: a step that failed after it has changed the weights (version "
                f"{learner.version} in place of {version}); close the run and open it again, it goes on from what is saved"
            )
        self.store.set_meta(RANDOM.format(step), _random_state())
        await in_thread(self.store.sync)
        await in_thread(learner.save, self.folder(step))
        if self.keep is not None:
            await in_thread(self._thin_out)

    def _thin_out(self) -> None:
        there = checkpoints(self.run_dir)
        best = best_step(self.store, [checkpoint_step(it) for it in there])
        for folder in there[: -self.keep]:
            if checkpoint_step(folder) != best and remove_old(folder):
                self.store.set_meta(RANDOM.format(checkpoint_step(folder)), None)

    async def restore(self, learner: Learner) -> int:
        """Give the learner the newest checkpoint that is whole, and return its step; damaged ones are set aside with a warning.

        The generators of ``random`` and numpy go on as they would have. Raises StoreError where none is whole.
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
            _go_on(self.store.meta(RANDOM.format(checkpoint_step(folder))))
            return checkpoint_step(folder)
        raise StoreError(
            f"no checkpoint of {self.run_dir} is whole; all are set aside as checkpoints/*.damaged there: {damaged}. Put a copy "
            "back in its place, or train again with this run_dir: it begins with the start weights, and uses the runs that it "
            "has of the agent"
        ) from damaged


def best_step(store: Store, steps: list[int]) -> int | None:
    """Return which of the steps was evaluated best, over all temperatures; of equals the last, None where none was."""
    successes: dict[int, list[float]] = defaultdict(list)
    for it in store.meta("evaluations", []):
        successes[it["step"]].append(it["success"])
    return max(
        (step for step in steps if step in successes),
        key=lambda step: (sum(successes[step]) / len(successes[step]), step),
        default=None,
    )


def _random_state() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    key = numpy["state"]["key"].tolist()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": {**numpy, "state": {**numpy["state"], "key": key}},
    }


def _go_on(state: dict[str, Any] | None) -> None:
    """Take up a ``_random_state``; None, of a checkpoint that was made before there were any, changes nothing."""
    if state is None:
        return
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy = state["numpy"]
    key = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": key}})
