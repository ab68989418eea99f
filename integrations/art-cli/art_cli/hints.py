"""Signs that a run may have learnt to please its reward rather than to do the task: figures and a sentence for each.

A hint is no verdict: it names what changed together with the reward, and where to look. Knows nothing about how a run goes. Of a
long run a bounded number of steps is read: ``STEPS_READ`` of its first third and as many of its last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from art_core.loop.metrics import Z
from art_core.store import Store
from art_core.store.rollouts import SCORED
from art_core.store.run_folder import store_file

STEPS_READ = 50
"""Of a third of the run."""
FEWEST = 3
"""Steps of a third below which nothing is said."""
FEWEST_RUNS = 30
"""In groups that tell something, below which a correlation says nothing."""
LARGE = 1.5
"""Times: a mean that became so much larger, or smaller, has drifted."""
LARGE_SHARE = 0.25
"""The same of a share of runs that should be small."""
CLEAR = 0.3
"""A rank correlation with the reward, within groups, from which the reward pays for something."""
SURE = 4.0
"""Times its standard error: a rise of the training batches that is one."""
SAME = 0.75
"""Of all runs with one and the same last answer, in ``MANY`` tasks or more: what is asked hardly matters any more."""
MANY = 8


class Shape(NamedTuple):
    """A scored rollout without its calls' content, except for the last answer."""

    rollout_id: str
    group: str
    task_id: str | None
    failed: bool
    reward: float
    calls: int
    sampled_tokens: int
    cut_off: int
    """Calls that ended at their token limit."""
    answer: bytes | None
    """The ids sampled in the last call, as they are stored; None if there is no call."""


SHAPES = f"""
SELECT rollouts.rollout_id, coalesce(grp, rollouts.rollout_id), task_id, error IS NOT NULL, scores.reward, count(calls.seq),
    coalesce(sum(length(sampled)), 0) / 4, coalesce(sum(finish_reason = 'length'), 0),
    (SELECT sampled FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND NOT replaced ORDER BY seq DESC LIMIT 1)
FROM {SCORED} LEFT JOIN calls ON calls.rollout_id = rollouts.rollout_id AND NOT replaced
WHERE step = ? AND split = 'train' AND finished IS NOT NULL AND scores.reward IS NOT NULL GROUP BY rollouts.seq
"""

SIZES: dict[str, tuple[Callable[[Shape], float], str, str]] = {
    "tokens": (lambda it: it.sampled_tokens, "sampled tokens a run", "longer answers are better ones"),
    "calls": (lambda it: it.calls, "calls a run", "more calls are of use"),
}
SHARES: dict[str, tuple[Callable[[Shape], float], str, str]] = {
    "cut_off": (
        lambda it: float(it.cut_off > 0),
        "runs with a call cut off at its token limit",
        "these should be paid",
    ),
    "failed": (lambda it: float(it.failed), "runs that failed", "a failed run should be paid"),
}


def hints_of(run_dir: Path, report: Mapping[str, Any]) -> list[str]:
    """Return the hints of a run folder, whose ``report.json`` says ``report``."""
    with Store(store_file(run_dir)) as store:
        return hints(store, store.history(report["steps"]), report["evaluations"], look=f"art view {run_dir}")


def hints(
    store: Store,
    history: Sequence[tuple[int, Mapping[str, float]]],
    evaluations: Sequence[Mapping[str, Any]],
    look: str,
) -> list[str]:
    """Return a sentence for every sign that is there; ``look`` is where a person sees the runs."""
    sampled = [
        (step, metrics) for step, metrics in history if "groups_with_contrast" in metrics
    ]  # not the supervised ones
    steps = [step for step, _ in sampled]
    third = len(steps) // 3
    if third < FEWEST:
        return []
    first, last = _read(store, steps[:third]), _read(store, steps[-third:])
    found = [*_drifts(first, last), *_sameness(first, last)]
    found += _held_out([metrics for _, metrics in sampled], evaluations)
    return [f"{it}: {look}" for it in found]


def _read(store: Store, steps: Sequence[int]) -> list[Shape]:
    """Return the runs of up to ``STEPS_READ`` of the steps, evenly chosen."""
    chosen = sorted({int(it) for it in np.linspace(0, len(steps) - 1, STEPS_READ)})
    return [shape for place in chosen for shape in shapes(store, steps[place])]


def shapes(store: Store, step: int) -> list[Shape]:
    """Return the scored training rollouts of a step, in the order in which they began."""
    return [Shape(*row) for row in store.rows(SHAPES, (step,))]


def _drifts(first: Sequence[Shape], last: Sequence[Shape]) -> Iterable[str]:
    if not first or not last:
        return
    for size, what, claim in SIZES.values():
        before, after = (float(np.mean([size(it) for it in shapes])) for shapes in (first, last))
        paid = within_groups([*first, *last], size)
        longer = after >= LARGE * before and paid >= CLEAR
        shorter = after <= before / LARGE and paid <= -CLEAR
        if longer or shorter:
            more = "more" if longer else "fewer"
            yield (
                f"{before:.3g} {what} became {after:.3g}, and within groups runs with {more} have the better rewards (rank "
                f"correlation {paid:+.2f}). See whether the reward pays for that, or {claim}"
            )
    for share, what, claim in SHARES.values():
        before, after = (float(np.mean([share(it) for it in shapes])) for shapes in (first, last))
        paid = within_groups([*first, *last], share)
        if after >= before + LARGE_SHARE and paid > -CLEAR:
            yield (
                f"{before:.0%} {what} became {after:.0%}, and within groups these have no worse rewards (rank correlation "
                f"{paid:+.2f}). See whether {claim}"
            )


def within_groups(shapes: Sequence[Shape], size: Callable[[Shape], float]) -> float:
    """Return Spearman's rank correlation between ``size`` and the reward within groups; 0 where too few groups tell."""
    together = own = rewards = 0.0
    runs = 0
    for _, group in groupby(sorted(shapes, key=lambda it: it.group), key=lambda it: it.group):
        members = list(group)
        x, y = _ranks([size(it) for it in members]), _ranks([it.reward for it in members])
        if x.any() and y.any():
            together, own, rewards, runs = together + x @ y, own + x @ x, rewards + y @ y, runs + len(members)
    return float(together / np.sqrt(own * rewards)) if runs >= FEWEST_RUNS else 0.0


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Return the ranks around their mean; equal values share theirs, so all are 0 where all values are equal."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    shared = np.cumsum(counts) - (counts - 1) / 2
    return shared[place] - (len(values) + 1) / 2


def _sameness(first: Sequence[Shape], last: Sequence[Shape]) -> Iterable[str]:
    """Tell where one answer has become that of most runs, whatever the task."""
    said = Counter(it.answer for it in last if it.answer is not None)
    for answer, times in said.most_common(1):
        alike = [it for it in last if it.answer == answer]
        tasks, share = len({it.task_id for it in alike}), times / len(last)
        before = max(Counter(it.answer for it in first).values(), default=0) / max(1, len(first))
        if share >= SAME and share >= LARGE * before and tasks >= MANY:
            yield (
                f"{share:.0%} of the last runs end with the same answer, in {tasks} tasks (rollout {alike[-1].rollout_id}, for "
                f"example), and at most {before:.0%} of the first did. See whether it is the right one for all of these"
            )


def _held_out(metrics: Sequence[Mapping[str, float]], evaluations: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Tell where training goes up and what is held out does not follow."""
    name = "success" if any("success" in it for it in metrics) else "reward"
    values = [it[name] for it in metrics if name in it]
    third = len(values) // 3
    measured = [it for it in evaluations if it["temperature"] == evaluations[0]["temperature"]]
    if third < FEWEST or len({it["step"] for it in measured}) < 2:
        return
    early, late = np.array(values[:third]), np.array(values[-third:])
    rise = float(late.mean() - early.mean())
    if rise <= SURE * float(np.hypot(early.std(ddof=1), late.std(ddof=1))) / np.sqrt(third):
        return
    before, after = min(measured, key=lambda it: it["step"]), max(measured, key=lambda it: it["step"])
    change = after["success"] - before["success"]
    # Few tasks say little: a change that may as well be the rise in training is no sign.
    if change <= 0 and change + Z * float(np.hypot(before["stderr"], after["stderr"])) < rise:
        yield (
            f"the {name} of the training batches rose from {early.mean():.3g} to {late.mean():.3g}, and on {after['n']} held-out "
            f"tasks it went from {before['success']:.3g} to {after['success']:.3g} (95 %: {after['interval'][0]:.3g} to "
            f"{after['interval'][1]:.3g}). See what the reward pays for that the held-out one does not"
        )
