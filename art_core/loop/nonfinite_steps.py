"""Steps that were not taken because a value was NaN or infinite: found before the step, kept for whoever looks for the reason.

Knows nothing about learners, or about when a run has dropped too many.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from art_core.errors import NotFiniteError, StoreError
from art_core.store.run_folder import write_whole
from art_core.types import TokenTree, Trajectory

SAID = "step %d was dropped and the weights are as they were: %s. What it was given is named in %s"


def check_given(trees: Sequence[TokenTree], trajectories: Sequence[Trajectory]) -> None:
    """Raise NotFiniteError where a trained target's recorded logprob or advantage is not finite."""
    trained = [(tree, tree.weights != 0) for tree in trees]
    broken = [
        what
        for what, name in (("logprobs", "old_logprobs"), ("advantages", "advantages"))
        if not all(np.isfinite(getattr(tree, name)[rows]).all() for tree, rows in trained)
    ]
    if not broken:
        return
    calls = {
        trajectory.rollout_id: requests
        for trajectory in trajectories
        if (requests := [it.request_id for it in trajectory.calls if not np.isfinite(it.logprobs).all()])
    }
    hint = (
        "the engine that sampled them answers with such logprobs"
        if calls
        else "the rewards are too large to be compared"
    )
    raise NotFiniteError(
        f"{' and '.join(broken)} of its calls are not finite; {hint}", {"given": broken, "calls": calls}
    )


def keep(
    folder: Path, step: int, version: int, trajectories: Sequence[Trajectory], error: NotFiniteError
) -> Path:  # fmt: skip
    """Write which rollouts a dropped step was given and what was not finite; return the file."""
    path = folder / f"step-{step:06d}.json"
    content: dict[str, Any] = {
        "step": step,
        "version": version,
        "why": str(error),
        "not_finite": error.found,
        "rollouts": [{"rollout_id": it.rollout_id, "reward": it.reward} for it in trajectories],
    }
    try:
        folder.mkdir(exist_ok=True)
        write_whole(path, json.dumps(content, indent=2) + "\n")
    except OSError as failed:
        raise StoreError(f"{path} cannot be written: {failed}; check the disk") from failed
    return path
