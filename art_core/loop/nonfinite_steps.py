"""Steps that are dropped because a value is NaN or infinite: their inputs are checked, and kept to find the reason."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from art_core.errors import NotFiniteError, StoreError
from art_core.store.run_folder import write_whole
from art_core.types import TokenTree, Trajectory

DROPPED = "step %d was dropped, and the weights are unchanged: %s. Its rollouts are listed in %s"


def check_inputs(trees: Sequence[TokenTree], trajectories: Sequence[Trajectory]) -> None:
    """Raise NotFiniteError if a recorded logprob or an advantage of a trained target is not finite."""
    broken = [
        name.removeprefix("old_")
        for name in ("old_logprobs", "advantages")
        if not all(np.isfinite(getattr(tree, name)[tree.weights != 0]).all() for tree in trees)
    ]
    if not broken:
        return
    calls = {
        trajectory.rollout_id: requests
        for trajectory in trajectories
        if (requests := [call.request_id for call in trajectory.calls if not np.isfinite(call.logprobs).all()])
    }
    reason = "the engine returned such logprobs" if calls else "the rewards are too large to compare"
    raise NotFiniteError(
        f"{' and '.join(broken)} of its calls are not finite; {reason}", {"inputs": broken, "calls": calls}
    )


def keep(folder: Path, step: int, version: int, trajectories: Sequence[Trajectory], error: NotFiniteError) -> Path:
    """Write a dropped step's rollouts, and what was not finite, to a file; return its path."""
    path = folder / f"step-{step:06d}.json"
    content = {
        "step": step,
        "version": version,
        "why": str(error),
        "not_finite": error.details,
        "rollouts": [{"rollout_id": t.rollout_id, "reward": t.reward} for t in trajectories],
    }
    try:
        folder.mkdir(exist_ok=True)
        write_whole(path, json.dumps(content, indent=2) + "\n")
    except OSError as failed:
        raise StoreError(f"can't write {path}: {failed}; check the disk") from failed
    return path
