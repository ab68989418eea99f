"""What is trained on and what is measured: positions and games, and what a move is worth. Knows nothing about models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from art_core.types import Trajectory

from .agent import invalid_share
from .players import any_move, by_reward
from .rules import Board, as_board, first_board, legal_moves, move_values, slide, with_random_tile

MOVES = 16
"""Of a training run."""
APART = 20
"""Moves between the positions that are taken from one game, on average."""
TRAINING_SEEDS = range(1_000_000)
HELD_OUT_SEEDS = range(9_000_000, 10_000_000)
"""Of games; no seed is in both."""
INVALID = -1.0
"""What an invalid move is worth; a legal one is between -1 and 1."""


def training_positions(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``n`` positions to play on from, early and late in their games, as arguments of ``play``."""
    rng, found = random.Random(seed), []
    while len(found) < n:
        game = rng.choice(TRAINING_SEEDS)
        found += [{"seed": game, "board": board, "most_moves": MOVES} for board in _stages(random.Random(game))]
    return rng.sample(found, n)


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


def _stages(rng: random.Random) -> Iterator[Board]:
    """Yield a game's positions, one of ``APART`` of them, by a player who is good at times."""
    board, skill = first_board(rng), rng.random()
    while legal := legal_moves(board):
        if rng.random() < 1 / APART:
            yield board
        choose = by_reward if rng.random() < skill else any_move
        board = with_random_tile(slide(board, choose(board, legal, rng))[0], rng)
