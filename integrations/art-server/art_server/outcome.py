"""How a run stands or ended, why, and what its evaluations found before and after. Reads the store's notes only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from art_core.store.run_folder import is_claimed
from art_server import answers
from art_server.plain import plain, readable
from art_server.store_view import StoreView

RECENT = 4
"""Last steps over which the final reward is averaged: one step's mean is noisy."""
CANCELLED = "CancelledError"
INTERRUPTED = "interrupted by Ctrl-C, SIGTERM or its own program"
KILLED = "its process ended without closing the run: it was killed, or its machine was lost"
NOT_RECORDED = "it did not finish, and no reason was recorded"
MISSING = "missing"


def is_open(folder: Path, store: str) -> bool:
    """Return whether a process works in the folder. A killed process leaves SQLite's log behind, but not its lock."""
    claimed = is_claimed(folder)
    return (folder / f"{store}-wal").exists() if claimed is None else claimed


def status(
    view: StoreView, *, working: bool, kind: str, planned: int | None
) -> tuple[answers.RunStatus | None, str | None]:
    """Return how a run stands and, if it is known, why it is not finished."""
    if working:
        return "running", None
    # None: whoever opened the run never closed it. Folders of older versions do not say how they ended.
    known, ended = view.meta("ended", MISSING) != MISSING, view.meta("ended", "")
    stopped, last = view.meta("stopped"), view.step_counts()[1]
    done = view.meta("evaluations") if kind == "evaluation" else planned is not None and (last or 0) >= planned
    if ended is None:
        return "crashed", KILLED
    if ended and not str(ended).startswith(CANCELLED):
        return "crashed", readable(str(ended))
    if planned is None and kind == "training" and not view.meta("dry_run"):
        # Its own program decides when it ends, and what is left open then is cancelled.
        return ("finished" if known else None), None
    if ended:
        return "stopped", INTERRUPTED
    if done:
        return "finished", None
    if planned is None and kind == "training":
        return "dry run", None
    if isinstance(stopped, Mapping) and stopped.get("step") == last:
        return "stopped", readable(str(stopped.get("reason")))
    return "crashed", NOT_RECORDED


def pairs(evaluations: Sequence[Any]) -> list[answers.EvaluationPair]:
    """Return for each temperature what was found before training and by the newest evaluation since, in the order measured."""
    found: dict[Any, answers.EvaluationPair] = {}
    for it in evaluations:
        if not isinstance(it, dict) or it.get("name") == "evaluation":
            continue
        temperature = it.get("temperature")
        pair = found.setdefault(repr(temperature), answers.EvaluationPair(temperature=plain(temperature)))
        if it.get("name") == "before":
            pair.before = without_ids(it)
        elif pair.after is None or _step(it) >= _step(pair.after):
            pair.after = without_ids(it)
    return list(found.values())


def evaluations_of(evaluations: Any) -> dict[str, answers.EvaluationOf]:
    """Return by which evaluation each rollout was made."""
    return {
        rollout_id: answers.EvaluationOf(name=readable(str(it.get("name"))), temperature=plain(it.get("temperature")))
        for it in (evaluations if isinstance(evaluations, list) else ())
        if isinstance(it, dict) and isinstance(it.get("rollout_ids"), list)
        for rollout_id in it["rollout_ids"]
        if isinstance(rollout_id, str)
    }


def final_reward(view: StoreView) -> float | None:
    """Return the mean reward of the last steps; that of the calls if only calls have rewards."""
    last = view.step_counts()[1]
    if last is None:
        return None
    rows = [metrics for _, _, metrics in view.steps(after=last - RECENT, limit=RECENT)]
    rewards, of_calls = (
        [it[name] for it in rows if isinstance(it.get(name), int | float)] for name in ("reward", "call_reward")
    )
    rewards = of_calls if of_calls and not any(rewards) else rewards
    return sum(rewards) / len(rewards) if rewards else None


def without_ids(evaluation: Any) -> Any:
    """Return an evaluation without the list of its rollouts."""
    if not isinstance(evaluation, dict):
        return None
    return plain({key: value for key, value in evaluation.items() if key != "rollout_ids"})


def _step(evaluation: Mapping[str, Any]) -> float:
    step = evaluation.get("step")
    return step if isinstance(step, (int, float)) else -1
