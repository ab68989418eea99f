"""How the search player rates moves and boards."""

from __future__ import annotations

import functools
import math

from .rules import DIRECTIONS, Board, Line, empty_cells, slide, smoothness, with_tile

INVALID_VALUE = -1000.0
"""Of a move that changes nothing."""


def evaluate_move(board: Board, direction: str, depth: int) -> float:
    """Return the value of a move, averaged over the tiles that may appear, with best play ``depth`` moves deep."""
    if depth == 0:
        return evaluate_board(board)
    after, _ = slide(board, direction)
    if after == board:
        return INVALID_VALUE
    cells = empty_cells(after)
    if not cells:
        return evaluate_board(after)
    # At depth 0 the direction doesn't matter.
    directions = DIRECTIONS if depth > 1 else DIRECTIONS[:1]
    total = 0.0
    for cell in cells:
        for tile, probability in ((2, 0.9), (4, 0.1)):
            following = with_tile(after, cell, tile)
            total += probability * max(evaluate_move(following, it, depth - 1) for it in directions)
    return total / len(cells)


@functools.lru_cache(maxsize=1_000_000)
def evaluate_board(board: Board) -> float:
    """Rate a board: empty cells, a large tile, smooth and monotonic lines."""
    largest = max(map(max, board))
    of_largest = math.log2(largest) * 100 if largest else 0.0
    return len(empty_cells(board)) * 10 + of_largest + smoothness(board) * 50 + monotonicity(board) * 100


def monotonicity(board: Board) -> float:
    """Return minus the lines' distance from all rising, or all falling."""
    total = 0.0
    for lines in (board, zip(*board, strict=True)):
        falls, rises = zip(*map(_steps, lines), strict=True)
        total += max(sum(falls), sum(rises))
    return total


@functools.lru_cache(maxsize=200_000)
def _steps(line: Line) -> tuple[float, float]:
    """Return minus the total fall and minus the total rise of a line, from tile to tile, skipping empty cells."""
    falls = rises = 0.0
    current, following = 0, 1
    while following < len(line):
        while following < len(line) and line[following] == 0:
            following += 1
        following = min(following, len(line) - 1)  # the last cell counts even if it is empty
        step = math.log2(line[following] or 1) - math.log2(line[current] or 1)
        falls, rises = falls + min(step, 0.0), rises - max(step, 0.0)
        current, following = following, following + 1
    return falls, rises
