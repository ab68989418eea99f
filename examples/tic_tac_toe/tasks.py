"""Games to learn from and games to measure, with what each move and each game is worth. Knows nothing about models."""

from __future__ import annotations

import random
from typing import Any

from art_core.types import Trajectory

from .game import EMPTY, opening

MOST_MOVES = 7
"""Self-play begins on boards with so many random moves at most."""
DISCOUNT = 0.6
"""What a move is worth of the same move one own turn later: the last move before the end decided most."""
ILLEGAL = -1.5
"""Worse than any loss."""


def self_play(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``n`` boards from which the policy plays both sides: early and late ones alike."""
    rng = random.Random(seed)
    return [{"board": opening(rng.randint(0, MOST_MOVES), rng)} for _ in range(n)]


def matches(n: int, opponent: str, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``n`` whole games against ``opponent`` (``"random"`` or ``"perfect"``), half of them with each side."""
    return [{"board": EMPTY, "opponent": opponent, "side": "XO"[i % 2], "seed": seed * 100_003 + i} for i in range(n)]


def reward(trajectory: Trajectory) -> float:
    """Credit every move of self-play to the side that made it; score a match 1 for a win, 0.5 for a draw, 0 for a loss.

    A game of self-play as a whole is worth 0, because what one side wins the other loses: so a move that is given no credit
    of its own teaches nothing.
    """
    task, game = trajectory.task, trajectory.output
    if game is None:
        trajectory.metrics["loss"] = 1.0
        return 0.0
    if "opponent" in task:
        won, lost = game["winner"] == task["side"], game["winner"] not in (task["side"], None)
        trajectory.metrics.update(win=float(won), loss=float(lost), illegal=float(game["illegal"] is not None))
        return 1.0 if won else 0.0 if lost else 0.5
    _credit_moves(trajectory, game)
    trajectory.metrics.update(draw=float(game["winner"] is None), illegal=float(game["illegal"] is not None))
    return 0.0


def _credit_moves(trajectory: Trajectory, game: dict[str, Any]) -> None:
    last = len(trajectory.calls) - 1
    if game["illegal"]:  # whoever could not play has lost; the other has not won by that
        trajectory.call_rewards[last] = ILLEGAL
        return
    for side in "XO":
        outcome = 0.0 if game["winner"] is None else 1.0 if game["winner"] == side else -1.0
        for index, call in enumerate(trajectory.calls):
            if call.made_by(side.lower()):
                trajectory.call_rewards[index] = outcome * DISCOUNT ** ((last - index) // 2)
