"""Tic-tac-toe: the rules, a perfect player and a random one.

A board is a string of nine characters, row by row: ``X``, ``O``, or the cell's number if it is free.
"""

from __future__ import annotations

import random
from functools import cache

EMPTY = "123456789"
LINES = ("012", "345", "678", "036", "147", "258", "048", "246")


def free_cells(board: str) -> list[str]:
    """Return the legal moves: the numbers of the free cells."""
    return [cell for cell in board if cell.isdigit()]


def side_to_move(board: str) -> str:
    """Return whose turn it is; X begins."""
    return "X" if board.count("X") == board.count("O") else "O"


def play(board: str, move: str) -> str:
    """Return the board after ``move`` by the side to move. Raises ValueError if it is illegal."""
    if move not in free_cells(board):
        raise ValueError(f"{move!r} is not a free cell of {board!r}; free are {', '.join(free_cells(board)) or 'none'}")
    return board.replace(move, side_to_move(board))


def winner(board: str) -> str | None:
    """Return the side that has three in a row, if any."""
    for line in LINES:
        first, second, third = (board[int(place)] for place in line)
        if first == second == third:
            return first
    return None


def is_over(board: str) -> bool:
    return winner(board) is not None or not free_cells(board)


@cache
def value(board: str) -> int:
    """Return the outcome for the side to move if both play perfectly: 1 a win, 0 a draw, -1 a loss."""
    if is_over(board):
        return -1 if winner(board) else 0
    return max(-value(play(board, move)) for move in free_cells(board))


def perfect_move(board: str, rng: random.Random) -> str:
    """Return a move that keeps the best outcome."""
    return rng.choice([move for move in free_cells(board) if -value(play(board, move)) == value(board)])


def random_move(board: str, rng: random.Random) -> str:
    """Return any legal move."""
    return rng.choice(free_cells(board))


def opening(moves: int, rng: random.Random) -> str:
    """Return a board after ``moves`` random moves on which the game is not over."""
    while True:
        board = EMPTY
        while not is_over(board) and len(free_cells(board)) > 9 - moves:
            board = play(board, random_move(board, rng))
        if not is_over(board):
            return board
