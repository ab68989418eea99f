"""Which lever trains next: the one that gains more per rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

PROMPTS, TEACHER, WEIGHTS = "prompts", "teacher", "weights"
RECENT = 2
"""Tranches from which a lever's gain is estimated: one is a small sample."""
UNTRIED = 0.5
"""Of the current lever's best gain: what an untried lever is expected to gain."""


@dataclass(frozen=True)
class Tranche:
    """A part of the budget that went into one lever."""

    lever: str
    rollouts: int
    rewards: tuple[float, ...]
    """The mean reward of each step."""


def gain(tranches: Sequence[Tranche]) -> float:
    """Return the rise of the reward per rollout: the slope of a line through the steps of consecutive tranches.

    0 for fewer than two steps.
    """
    rewards = [reward for tranche in tranches for reward in tranche.rewards]
    if len(rewards) < 2:
        return 0.0
    sizes = [tranche.rollouts / len(tranche.rewards) for tranche in tranches for _ in tranche.rewards]
    return float(np.polyfit(np.cumsum(sizes), rewards, 1)[0])


def next_lever(done: Sequence[Tranche], levers: Sequence[str]) -> str:
    """Return the lever for the next tranche, given those done; ``levers`` are in the order in which they are tried.

    The lever of the last tranche goes on until its gain falls below another's, which is that of the other's last tranches or, if
    it is untried, what ``UNTRIED`` expects.
    """
    if not done:
        return levers[0]
    blocks = [(lever, list(block)) for lever, block in groupby(done, lambda tranche: tranche.lever)]
    recent = {lever: gain(block[-RECENT:]) for lever, block in blocks}  # of each lever's last block
    current, block = blocks[-1]
    best = max(gain([tranche]) for tranche in block)
    for lever in levers:
        recent.setdefault(lever, UNTRIED * best)
    return max(levers, key=lambda lever: (recent[lever], lever == current))
