"""A run's status and the reason for it, and its evaluations before and after training, from the store's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from art_cli.next_steps import Ended
from art_core.store.run_folder import is_claimed
from art_server import responses
from art_server.plain import plain, readable
from art_server.store_view import StoreView

RECENT = 4
"""Last steps over which the final reward is averaged, because one step's mean is noisy."""
ALL_STEPS = 10**9
CANCELLED = "CancelledError"
INTERRUPTED = "interrupted by Ctrl-C, SIGTERM or its own program"
KILLED = "the process ended without closing the run: it was killed, or its machine was lost"
NOT_RECORDED = "the run didn't finish, and no reason was recorded"
MISSING = "missing"


def is_open(folder: Path, store: str) -> bool:
    """Return whether a process has the run open. A killed process leaves SQLite's log behind, but not its lock."""
    claimed = is_claimed(folder)
    return (folder / f"{store}-wal").exists() if claimed is None else claimed


def status(
    view: StoreView, *, working: bool, kind: str, planned: int | None
) -> tuple[responses.RunStatus | None, str | None]:
    """Return a run's status and, if known, the reason why it isn't finished."""
    if working:
        return "running", None
    # None means that the run was never closed. Folders of older versions don't have this key.
    known, ended = view.meta("ended", MISSING) != MISSING, view.meta("ended", "")
    stopped, last = view.meta("stopped"), view.step_counts()[1]
    done = view.meta("evaluations") if kind == "evaluation" else planned is not None and (last or 0) >= planned
    if ended is None:
        return "crashed", KILLED
    if ended and not str(ended).startswith(CANCELLED):
        return "crashed", readable(str(ended))
    if planned is None and kind == "training" and not view.meta("dry_run"):
        # The run's own program decides when it ends, and cancels whatever is still open then.
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


def pairs(evaluations: Sequence[Any]) -> list[responses.EvaluationPair]:
    """Return, for each temperature in order of measurement, the evaluations before training and the newest one since."""
    return [
        responses.EvaluationPair(
            temperature=plain((before or after or {}).get("temperature")),
            before=without_ids(before),
            after=without_ids(after),
        )
        for before, after in _by_temperature(evaluations)
    ]


def before_and_after(evaluations: Sequence[Any]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return ``pairs`` as they are stored, those that have both."""
    return [(before, after) for before, after in _by_temperature(evaluations) if before and after]


def _by_temperature(evaluations: Sequence[Any]) -> list[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]]:
    found: dict[str, tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]] = {}
    for each in evaluations:
        if not isinstance(each, dict) or each.get("name") == "evaluation":
            continue
        key = repr(each.get("temperature"))
        before, after = found.get(key, (None, None))
        if each.get("name") == "before":
            before = each
        elif after is None or step_of(each) >= step_of(after):
            after = each
        found[key] = before, after
    return list(found.values())


def evaluations_of(evaluations: Any) -> dict[str, responses.EvaluationOf]:
    """Return rollout id -> the evaluation that the rollout belongs to."""
    return {
        rollout_id: responses.EvaluationOf(
            name=readable(str(each.get("name"))), temperature=plain(each.get("temperature"))
        )
        for each in (evaluations if isinstance(evaluations, list) else ())
        if isinstance(each, dict) and isinstance(each.get("rollout_ids"), list)
        for rollout_id in each["rollout_ids"]
        if isinstance(rollout_id, str)
    }


def final_reward(view: StoreView) -> float | None:
    """Return the mean reward of the last steps; the mean of call rewards if only calls have rewards."""
    last = view.step_counts()[1]
    if last is None:
        return None
    rows = [metrics for _, _, metrics in view.steps(after=last - RECENT, limit=RECENT)]
    rewards, call_rewards = (
        [row[name] for row in rows if isinstance(row.get(name), int | float)] for name in ("reward", "call_reward")
    )
    rewards = call_rewards if call_rewards and not any(rewards) else rewards
    return sum(rewards) / len(rewards) if rewards else None


def ended_early(status: str | None, reason: str | None) -> Ended | None:
    """Return how a run ended before its last step; None if it didn't."""
    if status not in ("stopped", "crashed"):
        return None
    if reason in (INTERRUPTED, KILLED, NOT_RECORDED):
        return "interrupted"
    return "rule" if status == "stopped" else "error"


def without_ids(evaluation: Any) -> Any:
    """Return an evaluation without its list of rollout ids."""
    if not isinstance(evaluation, dict):
        return None
    return plain({key: value for key, value in evaluation.items() if key != "rollout_ids"})


def step_of(evaluation: Mapping[str, Any]) -> float:
    """Return the step after which it was measured; -1 if that isn't recorded."""
    step = evaluation.get("step")
    return step if isinstance(step, (int, float)) else -1
