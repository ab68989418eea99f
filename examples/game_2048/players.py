"""Players without a model, for demonstrations and comparisons."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .rules import Board, move_values

HABIT = ("right", "left", "up", "down")
"""A mediocre player: always the first of these that is legal."""


def any_move(board: Board, legal: Sequence[str], rng: random.Random) -> str:
    """The random player: any legal move."""
    return rng.choice(legal)


def by_habit(board: Board, legal: Sequence[str], rng: random.Random) -> str:
    """The first legal move of ``HABIT``."""
    return next(direction for direction in HABIT if direction in legal)


def by_reward(board: Board, legal: Sequence[str], rng: random.Random) -> str:
    """The move with the best immediate reward."""
    values = move_values(board)
    return max(legal, key=lambda direction: (values[direction], rng.random()))
