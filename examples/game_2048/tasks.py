"""What is trained on and what is measured: positions and games, and what a move is worth. Knows nothing about models."""

from __future__ import annotations

import random
from typing import Any

from art_core.types import Trajectory

from .agent import invalid_share
from .players import any_move, by_reward
from .rules import Board, as_board, first_board, legal_moves, move_values, slide, with_random_tile

MOVES = 16
"""Of a training run."""
LATEST = 300
"""The position of a training run comes before this move of its game."""
TRAINING_SEEDS = range(1_000_000)
HELD_OUT_SEEDS = range(9_000_000, 10_000_000)
"""Of games; no seed is in both."""
INVALID = -1.0
"""What an invalid move is worth; a legal one is between -1 and 1."""


def training_positions(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``n`` positions to play on from, early and late, as arguments of ``play``."""
    rng = random.Random(seed)
    return [
        {"seed": it, "board": _position(random.Random(it), rng.randrange(LATEST)), "most_moves": MOVES}
        for it in rng.sample(TRAINING_SEEDS, n)
    ]


def held_out_games(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``n`` games from their beginning, as arguments of ``play``; no training run has their seeds."""
    return [{"seed": it} for it in random.Random(seed).sample(HELD_OUT_SEEDS, n)]


def reward(trajectory: Trajectory) -> float:
    """Reward every move by itself, by what the environment gives for it; the run is worth its score.

    Compared are the calls of all runs of a task, so what a move is worth must not depend on the position that it is made in:
    it is the place of its reward between the worst and the best of the legal moves there, less the mean of these places.
    """
    game = trajectory.output
    if game is None:
        return 0.0
    for index, move in enumerate(game["moves"]):
        trajectory.call_rewards[index] = move_reward(as_board(move["board"]), move["said"])
    trajectory.metrics.update(max_tile=game["max_tile"], invalid=invalid_share(game))
    return float(game["score"])


def move_reward(board: Board, said: str | None) -> float:
    """Return what saying a move is worth on a board, from -1 to 1; 0 is the mean of the legal moves."""
    values = move_values(board)
    if said not in values:
        return INVALID
    span = max(values.values()) - min(values.values())
    return (values[said] - sum(values.values()) / len(values)) / (span or 1.0)


def _position(rng: random.Random, moves: int) -> list[list[int]]:
    """Return where a game stands after some moves of a player who is good at times; a game that ends begins again."""
    board, skill = first_board(rng), rng.random()
    for _ in range(moves):
        legal = legal_moves(board)
        choose = by_reward if rng.random() < skill else any_move
        board = with_random_tile(slide(board, choose(board, legal, rng))[0], rng) if legal else first_board(rng)
    return [list(row) for row in (board if legal_moves(board) else first_board(rng))]
