"""How two measurements of the same tasks differ: the mean difference with its 95 % interval, and what that says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import Literal

from art_core import Report

Z_95 = NormalDist().inv_cdf(0.975)
FEW = 10
"""Tasks below which graded rewards say too little for an interval."""
Verdict = Literal["better", "worse", "can't tell"]


@dataclass(frozen=True)
class Change:
    """The second measurement minus the first."""

    value: float
    low: float
    """Of the 95 % interval."""
    high: float
    tasks: int
    lost: int
    """Tasks on which the second is lower."""
    won: int
    """Tasks on which it is higher."""

    @property
    def verdict(self) -> Verdict:
        """``better`` or ``worse`` if the interval excludes 0."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else "can't tell"


def change(before: Sequence[float], after: Sequence[float]) -> Change:
    """Compare numbers of the same tasks, in the same order.

    If all are 0 or 1, the interval is Tango's score interval, else the normal one, which is infinite for less than ``FEW`` tasks.
    Raises ValueError if the lengths differ or are 0.
    """
    differences = [second - first for first, second in zip(before, after, strict=True)]
    value, tasks = fmean(differences), len(differences)
    lost, won = sum(it < 0 for it in differences), sum(it > 0 for it in differences)
    if {*before, *after} <= {0.0, 1.0}:
        return Change(value, *score_interval(lost, won, tasks, Z_95), tasks, lost, won)
    margin = Z_95 * stdev(differences) / math.sqrt(tasks) if tasks >= FEW else math.inf
    return Change(value, value - margin, value + margin, tasks, lost, won)


def results(report: Report) -> list[float | None]:
    """Return the successes of an evaluation; None for a rollout without a reward whose agent didn't fail.

    That its reward failed says nothing about the policy.
    """
    rollouts = zip(report.successes, report.trajectories, strict=True)
    return [success if it.reward is not None or it.error else None for success, it in rollouts]


def paired_change(before: Report, after: Report) -> Change | None:
    """Compare two evaluations of the same tasks, in the same order; None if no task has a result in both."""
    pairs = zip(results(before), results(after), strict=True)
    known = [(was, now) for was, now in pairs if was is not None and now is not None]
    return change([was for was, _ in known], [now for _, now in known]) if known else None


def score(lost: int, won: int, tasks: int, difference: float) -> float:
    """Return Tango's statistic, standard normal if the second rate is higher by ``difference`` (-1 to 1).

    ``lost`` and ``won`` of ``tasks`` pairs differ. Also right for few tasks (Statistics in Medicine 17, 1998).
    """
    linear = -won - lost + (2 * tasks - won + lost) * difference
    constant = -lost * difference * (1 - difference)
    root = math.sqrt(max(linear**2 - 8 * tasks * constant, 0.0))
    lost_rate = (root - linear) / (4 * tasks)
    variance = tasks * (2 * lost_rate + difference * (1 - difference))
    deviation = won - lost - tasks * difference
    if variance <= 0:
        return math.copysign(math.inf, deviation) if deviation else 0.0
    return deviation / math.sqrt(variance)


def score_interval(lost: int, won: int, tasks: int, z: float) -> tuple[float, float]:
    """Return the differences that the pairs don't contradict: those with a statistic from ``-z`` to ``z``."""
    return _crossing(lost, won, tasks, z), _crossing(lost, won, tasks, -z)


def _crossing(lost: int, won: int, tasks: int, z: float) -> float:
    """Return the difference at which the statistic, which falls, is ``z``."""
    low, high = -1.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if score(lost, won, tasks, middle) > z else (low, middle)
    return (low + high) / 2
