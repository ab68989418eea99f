"""Games to train on and games to evaluate, with the rewards of moves and games."""

from __future__ import annotations

import random
from typing import Any

from art_core.types import Trajectory

from .game import EMPTY, opening

MOST_MOVES = 7
"""Random moves on a board from which self-play starts, at most."""
DISCOUNT = 0.6
"""Per own turn between a move and the end: the last moves decided most."""
ILLEGAL = -1.5
"""Worse than any loss."""


def self_play(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``n`` boards, early and late ones, from which the policy plays both sides."""
    rng = random.Random(seed)
    return [{"board": opening(rng.randint(0, MOST_MOVES), rng)} for _ in range(n)]


def matches(n: int, opponent: str, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``n`` whole games against ``opponent`` (``"random"`` or ``"perfect"``), half of them with each side."""
    return [{"board": EMPTY, "opponent": opponent, "side": "XO"[i % 2], "seed": seed * 100_003 + i} for i in range(n)]


def reward(trajectory: Trajectory) -> float:
    """Credit every move of self-play to the side that made it; score a match 1 for a win, 0.5 for a draw, 0 for a loss.

    A game of self-play as a whole is worth 0, because what one side wins, the other loses. So a move without its own credit
    teaches nothing.
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
    if game["illegal"]:  # the side that could not play has lost; that isn't the other's merit
        trajectory.call_rewards[last] = ILLEGAL
        return
    for side in "XO":
        outcome = 0.0 if game["winner"] is None else 1.0 if game["winner"] == side else -1.0
        for index, call in enumerate(trajectory.calls):
            if call.made_by(side.lower()):
                trajectory.call_rewards[index] = outcome * DISCOUNT ** ((last - index) // 2)
