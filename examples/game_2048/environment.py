"""2048 as an environment of the classic API: one action and one reward per move."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from art_classic.environment import Environment

from .rules import (
    INVALID_REWARD,
    as_board,
    first_board,
    is_over,
    legal_moves,
    merge,
    reward,
    slide,
    smoothness,
    with_random_tile,
)


class Game2048Environment(Environment):
    """A game on a square board; the action is ``{"direction": "up" | "down" | "left" | "right"}``.

    Any other action changes nothing, like a move that moves no tile. ``seed`` determines the tiles that appear.
    """

    def __init__(self, board_size: int = 4, seed: int | None = None) -> None:
        super().__init__()
        self.board_size = board_size
        self.board = np.zeros((board_size, board_size), dtype=int)
        self.score = 0
        self.moves_count = 0
        self.rng = random.Random(seed)

    async def reset(self, board: Sequence[Sequence[int]] | None = None) -> dict[str, Any]:
        """Begin a game with two tiles, or continue from ``board``."""
        self.board = np.array(first_board(self.rng, self.board_size) if board is None else board, dtype=int)
        self.score = self.moves_count = 0
        return await self.get_state()

    async def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        """Make a move; if the board changed, a tile appears."""
        previous, score = self.board, self.score
        if moved := self.move(action.get("direction")):
            self.add_random_tile()
            self.moves_count += 1
        value = self.calculate_reward(previous, score, moved)
        info = {"moved": moved, "score_increase": self.score - score, "max_tile": int(self.board.max())}
        return await self.get_state(), value, self.is_game_over(), info

    def move(self, direction: str | None) -> bool:
        """Push all tiles and add merged tiles to the score; return whether the board changed."""
        before = as_board(self.board)
        after, gained = slide(before, direction or "")
        self.board = np.array(after, dtype=int)
        self.score += gained
        return after != before

    def move_left(self) -> bool:
        return self.move("left")

    def move_right(self) -> bool:
        return self.move("right")

    def move_up(self) -> bool:
        return self.move("up")

    def move_down(self) -> bool:
        return self.move("down")

    def merge_line(self, line: Sequence[int]) -> tuple[np.ndarray, bool]:
        """Push a line to its beginning, add merged tiles to the score, and return it with whether it changed."""
        before = tuple(map(int, line))
        after, gained = merge(before)
        self.score += gained
        return np.array(after, dtype=int), after != before

    def add_random_tile(self) -> None:
        """Put a 2 (nine times out of ten) or a 4 into an empty cell, if there is one."""
        self.board = np.array(with_random_tile(as_board(self.board), self.rng), dtype=int)

    def is_game_over(self) -> bool:
        return is_over(as_board(self.board))

    def calculate_reward(self, prev_board: np.ndarray, prev_score: int, moved: bool) -> float:
        """Return the reward of the move that led to the current board."""
        return reward(as_board(self.board), self.score - prev_score) if moved else INVALID_REWARD

    def calculate_smoothness(self) -> float:
        return smoothness(as_board(self.board))

    async def get_state(self) -> dict[str, Any]:
        return {
            "board": self.board.tolist(),
            "score": self.score,
            "moves_count": self.moves_count,
            "max_tile": int(self.board.max()),
            "empty_cells": int((self.board == 0).sum()),
            "available_moves": self.get_available_moves(),
        }

    def get_available_moves(self) -> list[str]:
        """Return the directions that change the board."""
        return legal_moves(as_board(self.board))
