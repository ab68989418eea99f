"""Signs of reward hacking: that a run may have learnt to please its reward instead of doing the task.

A hint is not a verdict: it says what changed together with the reward, with figures, and where to look. At most ``STEPS_READ``
steps of a run's first third and as many of its last third are read, however long the run is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from art_cli.resuming import quoted
from art_core.store import Store
from art_core.store.rollouts import SCORED
from art_core.store.run_folder import store_file

STEPS_READ = 50
"""Most steps that are read of a third of the run."""
MIN_STEPS = 3
"""Steps in a third of the run, below which there are no hints."""
MIN_ROLLOUTS = 30
"""Rollouts in groups with differing rewards, below which a correlation is not computed."""
DRIFT_FACTOR = 1.5
"""Factor by which a mean must have grown or shrunk to count as drift."""
DRIFT_SHARE = 0.25
"""Increase that counts as drift, for the share of rollouts with a fault."""
CLEAR_CORRELATION = 0.3
"""Rank correlation with the reward, within groups, from which the reward pays for something."""
SURE = 4.0
"""Standard errors by which the training batches must have improved."""
SAME_ANSWER_SHARE = 0.75
"""Share of rollouts that end with the same answer, in ``SAME_ANSWER_TASKS`` tasks or more, as if the task did not matter."""
SAME_ANSWER_TASKS = 8


class Shape(NamedTuple):
    """What hints need to know about a scored rollout."""

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
    """Token ids sampled in the last call, as they are stored; None if there was no call."""


SHAPES = f"""
SELECT rollouts.rollout_id, coalesce(grp, rollouts.rollout_id), task_id, error IS NOT NULL, scores.reward, count(calls.seq),
    coalesce(sum(length(sampled)), 0) / 4, coalesce(sum(finish_reason = 'length'), 0),
    (SELECT sampled FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND NOT replaced ORDER BY seq DESC LIMIT 1)
FROM {SCORED} LEFT JOIN calls ON calls.rollout_id = rollouts.rollout_id AND NOT replaced
WHERE step = ? AND split = 'train' AND finished IS NOT NULL AND scores.reward IS NOT NULL GROUP BY rollouts.seq
"""

SIZES: dict[str, tuple[Callable[[Shape], float], str, str]] = {
    "tokens": (lambda shape: shape.sampled_tokens, "sampled tokens per rollout", "longer answers really are better"),
    "calls": (lambda shape: shape.calls, "calls per rollout", "more calls really help"),
}
SHARES: dict[str, tuple[Callable[[Shape], float], str, str]] = {
    "cut_off": (
        lambda shape: float(shape.cut_off > 0),
        "of rollouts had a call cut off at its token limit",
        "they should be rewarded",
    ),
    "failed": (lambda shape: float(shape.failed), "of rollouts failed", "failed rollouts should be rewarded"),
}


def hints_of(run_dir: Path, report: Mapping[str, Any]) -> list[str]:
    """Return the hints about a run folder with this ``report.json``."""
    with Store(store_file(run_dir)) as store:
        found = hints(store, store.history(report["steps"]), report["evaluations"])
    return [f"{sentence}: art view {quoted(run_dir)}" for sentence in found]


class Rows(Protocol):
    """What reads a run's store."""

    def rows(self, query: str, values: Sequence[object]) -> list[tuple]:
        """Return the rows of a query of the tables."""


def hints(
    store: Rows, history: Sequence[tuple[int, Mapping[str, float]]], evaluations: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return one sentence per sign."""
    # Supervised steps don't have this metric.
    sampled = [(step, metrics) for step, metrics in history if "groups_with_contrast" in metrics]
    steps = [step for step, _ in sampled]
    third = len(steps) // 3
    if third < MIN_STEPS:
        return []
    first, last = _read(store, steps[:third]), _read(store, steps[-third:])
    held_out = _held_out([metrics for _, metrics in sampled], evaluations)
    return [*_drifts(first, last), *_sameness(first, last), *held_out]


def _read(store: Rows, steps: Sequence[int]) -> list[Shape]:
    """Return the rollouts of up to ``STEPS_READ`` evenly spaced steps."""
    indices = sorted({int(index) for index in np.linspace(0, len(steps) - 1, STEPS_READ)})
    return [shape for index in indices for shape in shapes(store, steps[index])]


def shapes(store: Rows, step: int) -> list[Shape]:
    """Return the scored training rollouts of a step, in the order in which they started."""
    return [Shape(*row) for row in store.rows(SHAPES, (step,))]


def _drifts(first: Sequence[Shape], last: Sequence[Shape]) -> Iterable[str]:
    if not first or not last:
        return
    for size, what, claim in SIZES.values():
        before, after = (float(np.mean([size(shape) for shape in shapes])) for shapes in (first, last))
        correlation = within_groups([*first, *last], size)
        longer = after >= DRIFT_FACTOR * before and correlation >= CLEAR_CORRELATION
        shorter = after <= before / DRIFT_FACTOR and correlation <= -CLEAR_CORRELATION
        if longer or shorter:
            more = "more" if longer else "fewer"
            yield (
                f"{what} went from {before:.3g} to {after:.3g}, and within groups, rollouts with {more} have better rewards "
                f"(rank correlation {correlation:+.2f}). Check whether the reward pays for that, or {claim}"
            )
    for share, what, claim in SHARES.values():
        before, after = (float(np.mean([share(shape) for shape in shapes])) for shapes in (first, last))
        correlation = within_groups([*first, *last], share)
        if after >= before + DRIFT_SHARE and correlation > -CLEAR_CORRELATION:
            yield (
                f"at first {before:.0%} {what}, at the end {after:.0%}, and within groups their rewards are not worse (rank "
                f"correlation {correlation:+.2f}). Check whether {claim}"
            )


def within_groups(shapes: Sequence[Shape], size: Callable[[Shape], float]) -> float:
    """Return Spearman's rank correlation between ``size`` and the reward within groups; 0 if too few groups have differences."""
    covariance = size_variance = reward_variance = 0.0
    rollouts = 0
    for _, group in groupby(sorted(shapes, key=lambda shape: shape.group), key=lambda shape: shape.group):
        members = list(group)
        x, y = _ranks([size(shape) for shape in members]), _ranks([shape.reward for shape in members])
        if x.any() and y.any():
            covariance, size_variance, reward_variance = (
                covariance + x @ y,
                size_variance + x @ x,
                reward_variance + y @ y,
            )
            rollouts += len(members)
    return float(covariance / np.sqrt(size_variance * reward_variance)) if rollouts >= MIN_ROLLOUTS else 0.0


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Return the ranks minus their mean; ties share a rank, so all ranks are 0 if all values are equal."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    shared = np.cumsum(counts) - (counts - 1) / 2
    return shared[inverse] - (len(values) + 1) / 2


def _sameness(first: Sequence[Shape], last: Sequence[Shape]) -> Iterable[str]:
    """Yield a hint if most rollouts now end with the same answer, whatever the task."""
    answers = Counter(shape.answer for shape in last if shape.answer is not None)
    for answer, count in answers.most_common(1):
        alike = [shape for shape in last if shape.answer == answer]
        tasks, share = len({shape.task_id for shape in alike}), count / len(last)
        before = max(Counter(shape.answer for shape in first).values(), default=0) / max(1, len(first))
        if share >= SAME_ANSWER_SHARE and share >= DRIFT_FACTOR * before and tasks >= SAME_ANSWER_TASKS:
            yield (
                f"{share:.0%} of the last rollouts end with the same answer, in {tasks} tasks (for example, rollout "
                f"{alike[-1].rollout_id}); at most {before:.0%} of the first did. Check whether it is right for all these tasks"
            )


def _held_out(metrics: Sequence[Mapping[str, float]], evaluations: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """Yield a hint if the training batches improve but the held-out tasks do not."""
    name = "success" if any("success" in step for step in metrics) else "reward"
    values = [step[name] for step in metrics if name in step]
    third = len(values) // 3
    measured = [it for it in evaluations if it["temperature"] == evaluations[0]["temperature"]]
    if third < MIN_STEPS or len({it["step"] for it in measured}) < 2:
        return
    early, late = np.array(values[:third]), np.array(values[-third:])
    rise = float(late.mean() - early.mean())
    if rise <= SURE * float(np.hypot(early.std(ddof=1), late.std(ddof=1))) / np.sqrt(third):
        return
    before, after = min(measured, key=lambda it: it["step"]), max(measured, key=lambda it: it["step"])
    change = after["success"] - before["success"]
    # With few held-out tasks, their intervals may include the rise in training. Standard errors can't tell: they are 0 at 0 % and
    # 100 %.
    possible = after["interval"][1] - before["interval"][0]
    room = 1 - before["success"] if before["counts_successes"] else math.inf
    if change <= 0 and possible < min(rise, room):
        yield (
            f"the {name} of the training batches rose from {early.mean():.3g} to {late.mean():.3g}, but on {after['n']} held-out "
            f"tasks it went from {before['success']:.3g} to {after['success']:.3g} (95 %: {after['interval'][0]:.3g} to "
            f"{after['interval'][1]:.3g}). Check what the training reward pays for that the held-out reward does not"
        )
