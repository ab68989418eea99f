"""Two evaluations of the same tasks compared: before and after training, or of two runs (``two_runs``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from art_cli.change import change, results
from art_core import Report, Trajectory
from art_server import answers, outcome, reading, responses
from art_server.plain import plain, readable
from art_server.store_view import RolloutRow, StoreView, read_snapshot

Key = tuple[str, int]
"""A task's id, and how many rollouts of the same task came before."""
Rollouts = Mapping[Key, RolloutRow]
"""An evaluation's rollouts."""
Evaluation = Mapping[str, Any]
"""As the store's metadata hold it."""


def evaluations_of(view: StoreView) -> list[Evaluation]:
    """Return the recorded evaluations, in order."""
    return [each for each in reading.list_of(view.meta("evaluations")) if isinstance(each, dict)]


def by_task(view: StoreView, evaluation: Evaluation) -> Rollouts:
    """Return an evaluation's rollouts by task, in its order."""
    ids = [each for each in reading.list_of(evaluation.get("rollout_ids")) if isinstance(each, str)]
    rollouts, seen = view.rollouts_by_id(ids), Counter[str]()
    found: dict[Key, RolloutRow] = {}
    for rollout in (rollouts[each] for each in ids if each in rollouts):
        task = rollout.stored.task_id or rollout.stored.rollout_id
        found[task, seen[task]] = rollout
        seen[task] += 1
    return found


@dataclass(frozen=True)
class Results:
    """What is compared of an evaluation's rollouts."""

    values: Mapping[Key, float]
    """Successes, or rewards if none is set. A rollout that couldn't be scored, though the agent didn't fail, is left out: it says
    nothing about the policy."""
    counts_successes: bool
    sets_success: bool
    """Whether a reward set ``metrics["success"]``."""


def results_of(rollouts: Rollouts) -> Results:
    """Return the results by the rules of ``art_core.Report``."""
    stored = [rollout.stored for rollout in rollouts.values()]
    scores = (
        Trajectory(each.task, calls=(), reward=each.reward, error=each.error, metrics=each.metrics) for each in stored
    )
    report = Report(tuple(scores), temperature=None)
    values = {
        key: reading.number(value) or 0.0
        for key, value in zip(rollouts, results(report), strict=True)
        if value is not None
    }
    return Results(values, report.counts_successes, any("success" in each.metrics for each in stored))


def compared(before: Rollouts, after: Rollouts, temperature: Any) -> answers.Change | None:
    """Return None if no task has a result in both, or only one of them sets ``metrics["success"]``."""
    first, second = results_of(before), results_of(after)
    keys = [key for key in first.values if key in second.values]
    if not keys or first.sets_success != second.sets_success:
        return None
    earlier, later = [first.values[key] for key in keys], [second.values[key] for key in keys]
    it = change(earlier, later)
    return answers.Change(
        temperature=plain(temperature),
        verdict=it.verdict,
        value=it.value,
        low=reading.number(it.low),
        high=reading.number(it.high),
        counts_successes=first.counts_successes and second.counts_successes,
        before=fmean(earlier),
        after=fmean(later),
        tasks=it.tasks,
        unscored=sum(key in after for key in before) - len(keys),
        lost=it.lost,
        won=it.won,
        p=_mcnemar(it.lost, it.won) if {*earlier, *later} <= {0.0, 1.0} else None,
    )


def _mcnemar(lost: int, won: int) -> float:
    from art_compare.statistics import mcnemar  # not at the top: it imports typer and rich

    return mcnemar(lost, won)


def changed(before: Rollouts, after: Rollouts) -> list[answers.ChangedTask]:
    """Return the tasks with another result, the greatest losses first."""
    first, second = results_of(before).values, results_of(after).values
    changes = {key: second[key] - first[key] for key in first if key in second}
    return [
        answers.ChangedTask(
            task_id=readable(key[0]),
            task=plain(after[key].stored.task),
            before=readable(before[key].stored.rollout_id),
            after=readable(after[key].stored.rollout_id),
            change=changes[key],
        )
        for key in sorted(changes, key=lambda key: changes[key])
        if changes[key]
    ]


def changed_tasks(folder: Path, *, limit: int, offset: int) -> responses.Page[answers.ChangedTask]:
    """Return a page of the tasks that changed at the first temperature with both evaluations."""
    tasks = _all_changed(folder)
    return responses.Page(total=len(tasks), limit=limit, offset=offset, items=tasks[offset : offset + limit])


def changes(folder: Path) -> dict[str, float]:
    """Return by how much these tasks changed, by the ids of their rollouts after training."""
    return {task.after: task.change for task in _all_changed(folder)}


def _all_changed(folder: Path) -> list[answers.ChangedTask]:
    def read(view: StoreView) -> list[answers.ChangedTask]:
        pairs = outcome.before_and_after(evaluations_of(view))
        return changed(*(by_task(view, each) for each in pairs[0])) if pairs else []

    return read_snapshot(folder / reading.STORE, read)


def newest(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the newest evaluation, the first of several temperatures."""
    return max(evaluations, key=outcome.step_of, default=None)
