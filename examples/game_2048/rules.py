"""The rules of 2048 as functions of boards: moves, tiles, and rewards."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from itertools import pairwise

Line = tuple[int, ...]
Board = tuple[Line, ...]
"""Rows of tiles, from the top; 0 is an empty cell."""

DIRECTIONS = ("up", "down", "left", "right")
INVALID_REWARD = -0.1
"""Of a move that changes nothing."""


def as_board(rows: Sequence[Sequence[int]]) -> Board:
    """Return rows of any kind as a board."""
    return tuple(tuple(map(int, row)) for row in rows)


@functools.lru_cache(maxsize=200_000)
def merge(line: Line) -> tuple[Line, int]:
    """Push a line to its beginning, merging equal neighbours once; return it and the sum of the merged tiles."""
    tiles = [tile for tile in line if tile]
    merged, gained, i = [], 0, 0
    while i < len(tiles):
        twice = i + 1 < len(tiles) and tiles[i] == tiles[i + 1]
        merged.append(tiles[i] * (1 + twice))
        gained += merged[-1] * twice
        i += 1 + twice
    return (*merged, *[0] * (len(line) - len(merged))), gained


def slide(board: Board, direction: str) -> tuple[Board, int]:
    """Return the board after a move, before a tile appears, and the move's score; unchanged for an unknown direction."""
    if direction not in DIRECTIONS:
        return board, 0
    upright = direction in ("up", "down")
    backwards = -1 if direction in ("down", "right") else 1
    pushed = [merge(line[::backwards]) for line in (_turned(board) if upright else board)]
    after = tuple(line[::backwards] for line, _ in pushed)
    return (_turned(after) if upright else after), sum(gained for _, gained in pushed)


def legal_moves(board: Board) -> list[str]:
    """Return the directions that change the board."""
    return [direction for direction in DIRECTIONS if slide(board, direction)[0] != board]


def empty_cells(board: Board) -> list[tuple[int, int]]:
    """Return the positions of the empty cells, row by row."""
    return [(i, j) for i, row in enumerate(board) for j, tile in enumerate(row) if not tile]


def is_over(board: Board) -> bool:
    """Whether no cell is empty and no neighbours are equal."""
    return not empty_cells(board) and not legal_moves(board)


def with_tile(board: Board, cell: tuple[int, int], tile: int) -> Board:
    """Return the board with a tile in a cell."""
    i, j = cell
    return (*board[:i], (*board[i][:j], tile, *board[i][j + 1 :]), *board[i + 1 :])


def with_random_tile(board: Board, rng: random.Random) -> Board:
    """Return the board with a 2 (nine times out of ten) or a 4 in an empty cell; unchanged if none is empty."""
    cells = empty_cells(board)
    return with_tile(board, rng.choice(cells), 2 if rng.random() < 0.9 else 4) if cells else board


def first_board(rng: random.Random, size: int = 4) -> Board:
    """Return a board with two random tiles."""
    return with_random_tile(with_random_tile(((0,) * size,) * size, rng), rng)


def smoothness(board: Board) -> float:
    """Return minus the sum of the differences between neighbouring tiles, in powers of two."""
    return -sum(map(_roughness, (*board, *_turned(board))))


def reward(board: Board, gained: int) -> float:
    """Return the reward of a legal move that scored ``gained`` and led to ``board``."""
    largest = max(map(max, board))
    of_largest = 0.1 * math.log2(largest) if largest else 0.0
    return gained / 100 + 0.01 * len(empty_cells(board)) + of_largest + 0.05 * smoothness(board)


def move_values(board: Board) -> dict[str, float]:
    """Return the reward of every legal move, before the tile appears that chance adds."""
    after = {direction: slide(board, direction) for direction in DIRECTIONS}
    return {direction: reward(new, gained) for direction, (new, gained) in after.items() if new != board}


@functools.lru_cache(maxsize=200_000)
def _roughness(line: Line) -> float:
    return sum(abs(math.log2(a) - math.log2(b)) for a, b in pairwise(line) if a and b)


def _turned(board: Board) -> Board:
    """Return the columns as rows."""
    return tuple(zip(*board, strict=True))
