"""A language model plays tic-tac-toe: a program as its users write it, with the OpenAI client and a request per move.

It doesn't mention art. The header names the side and the move of the game: ``x/1``, ``o/2``, ``x/3``, ...
"""

from __future__ import annotations

import random
from typing import Any

from openai import OpenAI

from .game import LINES, free_cells, is_over, perfect_move, play, random_move, side_to_move, winner

INSTRUCTION = "Answer with a free number for {side}:"
OPPONENTS = {"random": random_move, "perfect": perfect_move}

client = OpenAI(api_key="unused: the policy answers", base_url="https://api.openai.com/v1")


def prompt(board: str) -> list[dict[str, str]]:
    """Return the prompt: the rows of the board, then every line that one move completes, with that move last."""
    rows = [board[start : start + 3] for start in (0, 3, 6)]
    lines = ["".join(sorted((board[int(place)] for place in line), key=str.isdigit)) for line in LINES]
    nearly_made = [line for line in lines if line[0] == line[1] and line[2].isdigit()]
    shown = "\n".join(" ".join(cells) for cells in [*rows, *nearly_made])
    return [{"role": "user", "content": f"{INSTRUCTION.format(side=side_to_move(board))}\n{shown}"}]


def ask(board: str) -> str:
    """Return the model's answer for the side to move."""
    who = f"{side_to_move(board).lower()}/{10 - len(free_cells(board))}"
    reply = client.chat.completions.create(
        model="gpt-6-luna", messages=prompt(board), reasoning_effort="none", temperature=0, max_completion_tokens=8,
        extra_headers={"x-art-agent": who},
    )  # fmt: skip
    return (reply.choices[0].message.content or "").strip()


def agent(game: dict[str, Any]) -> dict[str, Any]:
    """Play from ``game["board"]`` to the end and return ``{"board", "winner", "moves", "illegal"}``.

    The model plays both sides, or only ``game["side"]`` against ``game["opponent"]``, whose moves depend on ``game["seed"]``.
    A side that answers anything but a free cell loses at once, and is named in ``illegal``.
    """
    board, moves, rng = game["board"], [], random.Random(game.get("seed"))
    while not is_over(board):
        side = side_to_move(board)
        model_plays = game.get("opponent") is None or side == game["side"]
        move = ask(board) if model_plays else OPPONENTS[game["opponent"]](board, rng)
        if move not in free_cells(board):
            return {"board": board, "winner": "O" if side == "X" else "X", "moves": moves, "illegal": side}
        board, moves = play(board, move), [*moves, move]
    return {"board": board, "winner": winner(board), "moves": moves, "illegal": None}
