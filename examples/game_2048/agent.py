"""The player: a model that sees the board and answers with a direction, or a search.

Every move is a separate model call that sees only the current board. A legal answer is played. Anything else counts as
invalid, and a random legal move is played instead, as the random player does.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from art_classic.agent import Agent

from .environment import Game2048Environment
from .rules import DIRECTIONS, as_board, smoothness
from .search import evaluate_board, evaluate_move, monotonicity

SYSTEM = "You play 2048. Answer with one word: up, down, left or right."
MAX_TOKENS = 8
"""Of an answer."""
SEARCH_DEPTH = 3
"""Of the search, in moves. Each additional move takes roughly a hundred times as long."""


def messages(board: Sequence[Sequence[int]]) -> list[dict[str, str]]:
    """Return the prompt for a move on ``board``; every tile takes five columns."""
    rows = "\n".join("".join(f" {tile:>4}" for tile in row) for row in board)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": rows}]


def read_direction(answer: str) -> str | None:
    """Return the direction that an answer names; None if it names none or several."""
    named = set(re.findall(r"\w+", answer.lower())) & set(DIRECTIONS)
    return named.pop() if len(named) == 1 else None


class Game2048Agent(Agent):
    """Plays by search (``strategy="minimax"``) or by the model's answers (``"deep_learning"``)."""

    def __init__(
        self,
        model_name: str = "Qwen/Qwen2.5-7B-Instruct",
        strategy: str = "minimax",
        temperature: float = 1.0,
        search_depth: int = SEARCH_DEPTH,
    ) -> None:
        super().__init__(model_name)
        self.strategy, self.temperature, self.search_depth = strategy, temperature, search_depth

    async def select_action(self, state: dict[str, Any]) -> dict[str, Any]:
        return await (self.minimax_action(state) if self.strategy == "minimax" else self.ml_based_action(state))

    async def ml_based_action(self, state: dict[str, Any]) -> dict[str, Any]:
        """Ask the model; the direction is None if its answer names none."""
        answer = await self.generate_response(messages(state["board"]), MAX_TOKENS, self.temperature)
        return {"direction": read_direction(answer), "reasoning": f"the model said {answer!r}"}

    async def minimax_action(self, state: dict[str, Any]) -> dict[str, Any]:
        """Choose the move that ``evaluate_move`` rates best."""
        if not state["available_moves"]:
            return {"direction": "up", "reasoning": "No moves available"}
        board = state["board"]
        values = {it: self.evaluate_move(board, it, self.search_depth) for it in state["available_moves"]}
        best = max(values, key=values.__getitem__)
        return {
            "direction": best,
            "reasoning": f"Minimax evaluation: {best} scored {values[best]:.2f}",
            "expected_score": values[best],
        }

    def evaluate_move(self, board: np.ndarray | Sequence[Sequence[int]], direction: str, depth: int) -> float:
        """Return the value of a move, averaged over the tiles that may appear, ``depth`` moves deep."""
        return evaluate_move(as_board(board), direction, depth)

    def evaluate_board(self, board: np.ndarray | Sequence[Sequence[int]]) -> float:
        return evaluate_board(as_board(board))

    def calculate_smoothness(self, board: np.ndarray | Sequence[Sequence[int]]) -> float:
        return smoothness(as_board(board))

    def calculate_monotonicity(self, board: np.ndarray | Sequence[Sequence[int]]) -> float:
        return monotonicity(as_board(board))


async def play(
    agent: Agent, seed: int, board: Sequence[Sequence[int]] | None = None, most_moves: int | None = None
) -> dict[str, Any]:
    """Play a game to its end, or ``most_moves`` moves, and return the result.

    ``seed`` determines the tiles and the moves that replace invalid ones. ``moves`` has the board and the answer of every call,
    in order.
    """
    environment, rng = Game2048Environment(seed=seed), random.Random(f"{seed}/instead")
    state, moves = await environment.reset(board), []
    while (legal := state["available_moves"]) and (most_moves is None or len(moves) < most_moves):
        said = (await agent.select_action(state))["direction"]
        moves.append({"board": state["board"], "said": said, "legal": said in legal})
        state, *_ = await environment.step({"direction": said if said in legal else rng.choice(legal)})
    return {
        "score": state["score"],
        "max_tile": state["max_tile"],
        "over": not state["available_moves"],
        "moves": moves,
    }


def invalid_share(game: Mapping[str, Any]) -> float:
    """Return the share of a game's moves that were invalid."""
    return sum(not move["legal"] for move in game["moves"]) / max(1, len(game["moves"]))
