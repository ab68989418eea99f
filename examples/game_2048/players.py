"""Players without a model: who the demonstrations come from, and who the model is compared with. Knows nothing about learning."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .rules import Board, move_values

HABIT = ("right", "left", "up", "down")
"""A mediocre player's: always the first of these that is legal."""


def any_move(board: Board, legal: Sequence[str], rng: random.Random) -> str:
    """The random player's: any legal move."""
    return rng.choice(legal)


def by_habit(board: Board, legal: Sequence[str], rng: random.Random) -> str:
    """The first legal move of ``HABIT``."""
    return next(direction for direction in HABIT if direction in legal)


def by_reward(board: Board, legal: Sequence[str], rng: random.Random) -> str:
    """The move whose own reward is best, whatever comes after it."""
    values = move_values(board)
    return max(legal, key=lambda direction: (values[direction], rng.random()))
