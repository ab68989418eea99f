"""Tests and intervals for two measurements of the same tasks.

Successes are compared by their pairs: a task that only one side solved is informative, one that both solved isn't. The p-value
is McNemar's, exact. The difference has Tango's score interval (``art_cli.change``). Everything else is resampled over the tasks
(paired bootstrap, percentiles).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

RESAMPLES = 4_000
LEVEL = 0.05
"""How often a gate may fail although nothing is worse."""
FEW = 20
"""Tasks below which resampling says too little: its intervals are too narrow."""
Z_LEVEL = NormalDist().inv_cdf(1 - LEVEL)


def is_binary(values: np.ndarray) -> bool:
    """Whether all numbers are 0 or 1."""
    return bool(np.isin(values, (0.0, 1.0)).all())


def discordant(pairs: np.ndarray) -> tuple[int, int]:
    """Return how many tasks only the first side solved, and only the second. ``pairs``: (tasks, 2), all 0 or 1."""
    return int((pairs[:, 0] > pairs[:, 1]).sum()), int((pairs[:, 0] < pairs[:, 1]).sum())


def mcnemar(lost: int, won: int) -> float:
    """Return the two-sided p-value of: both sides solve equally many tasks.

    ``lost``: tasks that only the first side solved, ``won``: that only the second solved.
    """
    return min(1.0, 2 * at_most(min(lost, won), lost + won))


def at_most(successes: int, trials: int) -> float:
    """Return the probability of at most so many heads when a fair coin is tossed."""
    return sum(math.comb(trials, k) for k in range(successes + 1)) / 2**trials


def binomial(successes: int, trials: int, rate: float) -> float:
    """Return the probability of at most so many successes."""
    if rate <= 0 or rate >= 1:
        return float(rate <= 0 or successes >= trials)
    log, log_other, all_ = math.log(rate), math.log1p(-rate), math.lgamma(trials + 1)
    orders = (all_ - math.lgamma(k + 1) - math.lgamma(trials - k + 1) for k in range(successes + 1))
    logs = (order + k * log + (trials - k) * log_other for k, order in enumerate(orders))
    return min(1.0, math.fsum(map(math.exp, logs)))


def power(difference: float, unequal: float, tasks: int) -> float:
    """Return about how often a gate finds that a side is worse by ``difference`` (above 0).

    ``unequal``: the share of the tasks that only one side solves.
    """
    unequal = max(unequal, difference)
    spread = math.sqrt(max(unequal - difference**2, 1e-12))
    return NormalDist().cdf((difference * math.sqrt(tasks) - Z_LEVEL * math.sqrt(unequal)) / spread)


def detectable(unequal: float, tasks: int, wanted: float = 0.8) -> float:
    """Return the smallest difference that a gate finds with about this ``power``; 1 if there is none."""
    return next((step / 1000 for step in range(1, 1001) if power(step / 1000, unequal, tasks) >= wanted), 1.0)


def resampled(values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Return ``RESAMPLES`` sorted values of a statistic, each of as many tasks, drawn with replacement. The same every time.

    ``values``: (tasks, n). ``statistic`` reduces (resamples, tasks, n) to (resamples,).
    """
    random, tasks = np.random.default_rng(0), len(values)
    at_once = max(1, 2_000_000 // max(1, values.size))
    parts = [
        statistic(values[random.integers(0, tasks, (min(at_once, RESAMPLES - begin), tasks))])
        for begin in range(0, RESAMPLES, at_once)
    ]
    return np.sort(np.concatenate(parts))


def percentiles(sorted_values: np.ndarray, outside: float) -> tuple[float, float]:
    """Return the bounds that leave ``outside`` (0 to 1) of the resamples on each side."""
    low, high = np.quantile(sorted_values, [outside, 1 - outside])
    return float(low), float(high)
