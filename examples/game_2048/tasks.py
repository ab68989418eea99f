"""Training positions, held-out games, and the reward."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from art_core.types import Trajectory

from .agent import invalid_share
from .players import any_move, by_reward
from .rules import Board, as_board, first_board, legal_moves, move_values, slide, with_random_tile

MOVES = 16
"""Per training rollout."""
APART = 20
"""Mean number of moves between positions sampled from one game."""
TRAINING_SEEDS = range(1_000_000)
HELD_OUT_SEEDS = range(9_000_000, 10_000_000)
"""Of games; no seed is in both."""
INVALID = -1.0
"""The reward of an invalid move; legal ones are between -1 and 1."""


def training_positions(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``n`` positions, early and late in their games, as arguments of ``play``."""
    rng, sampled = random.Random(seed), []
    while len(sampled) < n:
        game = rng.choice(TRAINING_SEEDS)
        sampled += [{"seed": game, "board": board, "most_moves": MOVES} for board in _stages(random.Random(game))]
    return rng.sample(sampled, n)


def held_out_games(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return ``n`` games from the beginning, as arguments of ``play``; their seeds are never trained on."""
    return [{"seed": it} for it in random.Random(seed).sample(HELD_OUT_SEEDS, n)]


def reward(trajectory: Trajectory) -> float:
    """Reward every move by its reward in the environment; the rollout's reward is its score.

    The calls of all rollouts of a task are compared, so a move's reward must not depend on its position. It is the place of the
    environment's reward between the worst and the best legal move there, minus the mean of these places.
    """
    game = trajectory.output
    if game is None:
        return 0.0
    for index, move in enumerate(game["moves"]):
        trajectory.call_rewards[index] = move_reward(as_board(move["board"]), move["said"])
    trajectory.metrics.update(max_tile=game["max_tile"], invalid=invalid_share(game))
    return float(game["score"])


def move_reward(board: Board, direction: str | None) -> float:
    """Return the reward of an answered move on a board, from -1 to 1; 0 is the mean of the legal moves."""
    values = move_values(board)
    if direction not in values:
        return INVALID
    span = max(values.values()) - min(values.values())
    return (values[direction] - sum(values.values()) / len(values)) / (span or 1.0)


def _stages(rng: random.Random) -> Iterator[Board]:
    """Yield about one in ``APART`` positions of a game by a player of random skill."""
    board, skill = first_board(rng), rng.random()
    while legal := legal_moves(board):
        if rng.random() < 1 / APART:
            yield board
        choose = by_reward if rng.random() < skill else any_move
        board = with_random_tile(slide(board, choose(board, legal, rng))[0], rng)
