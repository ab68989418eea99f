"""Bounds on a mean that hold at all times at once, so that they may be looked at after each observation."""

from __future__ import annotations

import math

import numpy as np

CELLS = 200
"""Means that are tried, evenly from 0 to 1; the bounds are widened to the next one."""
LARGEST_BET = 0.75
"""Share of the capital that a bet may lose at most."""


class Bounds:
    """A confidence sequence for the mean of observations between 0 and 1, with the error ``alpha`` over all times together.

    The hedged capital process with predictable plug-in bets of Waudby-Smith and Ramdas, "Estimating means of bounded random
    variables by betting" (JRSS B 2024, theorem 3): for each possible mean, one gambler bets that the observations are higher
    and one that they are lower. If a mean is true, the chance that the capital of either ever reaches 2 / alpha is at most
    alpha. The observations need not be independent, only have the same mean given those before.
    """

    def __init__(self, alpha: float) -> None:
        self.count = 0
        self._threshold = math.log(2 / alpha)
        self._means = np.linspace(0.0, 1.0, CELLS + 1)
        self._log_capital = np.zeros((2, CELLS + 1))
        self._most = np.zeros((2, CELLS + 1))
        """The largest capital so far, because what was ruled out once stays so."""
        self._sum = 0.5
        self._squares = 0.25
        with np.errstate(divide="ignore"):
            self._limits = LARGEST_BET / np.stack([self._means, 1 - self._means])

    def add(self, value: float) -> None:
        """Add an observation. Raises ValueError if it isn't between 0 and 1."""
        if not 0 <= value <= 1:
            raise ValueError(f"an observation must be between 0 and 1, not {value}")
        self.count += 1
        variance = self._squares / self.count
        bet = math.sqrt(2 * self._threshold / (variance * self.count * math.log(1 + self.count)))
        gains = np.minimum(bet, self._limits) * (value - self._means)
        self._log_capital += np.log1p([gains[0], -gains[1]])
        np.maximum(self._most, self._log_capital, out=self._most)
        self._sum += value
        self._squares += (value - self._sum / (self.count + 1)) ** 2

    @property
    def mean(self) -> float | None:
        """The mean of the observations; None without any."""
        return (self._sum - 0.5) / self.count if self.count else None

    @property
    def lower(self) -> float:
        """The lower bound."""
        possible = np.flatnonzero(self._most[0] < self._threshold)
        return float(self._means[max(possible[0] - 1, 0)]) if len(possible) else 1.0

    @property
    def upper(self) -> float:
        """The upper bound."""
        possible = np.flatnonzero(self._most[1] < self._threshold)
        return float(self._means[min(possible[-1] + 1, CELLS)]) if len(possible) else 0.0
