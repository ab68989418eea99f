"""One optimizer step and the swap to the weights that it made. Knows nothing about which groups are worth a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from art_core.capture import Door
from art_core.store import Store
from art_core.threads import in_thread
from art_core.types import Learner, Loss, TokenTree, Trajectory, Weights


async def update(
    learner: Learner, trees: Sequence[TokenTree], trajectories: Sequence[Trajectory], *, loss: Loss | None, step: int,
    in_place: bool, door: Door, store: Store, folder: Path,
) -> dict[str, float]:  # fmt: skip
    """Take one optimizer step on ``trees``, note what it was given as that of ``step``, and serve the new weights.

    ``in_place``: what is served may be the very weights that the step changes, so calls are held back meanwhile. Weights that
    are not in shared memory are saved in ``folder`` for the engine. Returns the learner's metrics; where its version stayed,
    no step was taken, and nothing is noted or swapped.
    """
    take: Callable[..., dict[str, float]] = learner.step if loss is None else functools.partial(learner.step, loss=loss)
    before = learner.version
    try:
        if in_place:
            await door.pause()
        metrics = await in_thread(take, trees)
        if learner.version != before:
            note = functools.partial(store.add_update, targets=metrics.get("targets"))
            await in_thread(note, step, learner.version, trajectories)
            await door.pause()
            # Before calls go on: one that slipped in would be answered by new weights and counted as the old ones'.
            await door.load(await _weights(learner, folder))
    finally:
        await door.resume()
    return metrics


async def _weights(learner: Learner, folder: Path) -> Weights:
    """Return what to serve, saved in ``folder`` where it is not in shared memory."""
    weights = await in_thread(learner.weights)
    if weights.live is not None:
        return weights
    await in_thread(learner.save, folder)
    saved = await in_thread(learner.weights)
    return dataclasses.replace(weights, path=saved.path or folder)
