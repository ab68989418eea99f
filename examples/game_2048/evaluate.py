"""Evaluate a player on held-out games, each played to its end: python -m examples.game_2048.evaluate runs/my-run

Other players are ``random``, ``search`` and ``reward``: see ``README.md``.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from art_classic.agent import Agent
from art_core.loop.display import Display

from .agent import Game2048Agent, invalid_share, play
from .players import any_move, by_reward
from .rules import as_board
from .tasks import held_out_games

MODEL = Path(__file__).parent / "model"
"""The start model."""
PLAYERS = {"random": any_move, "reward": by_reward}
"""Players without a model, by their names on the command line."""


class Scripted(Agent):
    """A player without a model."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.choose, self.rng = PLAYERS[name], random.Random(seed)

    async def select_action(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"direction": self.choose(as_board(state["board"]), state["available_moves"], self.rng)}


def player(name: str, temperature: float = 1.0, search_depth: int = 1) -> Agent:
    """Return the player of a name: one of ``PLAYERS``, ``"search"``, a model or a run folder."""
    if name in PLAYERS:
        return Scripted(name)
    strategy = "minimax" if name == "search" else "deep_learning"
    return Game2048Agent("tiny" if name == "search" else name, strategy, temperature, search_depth)


async def measure(agent: Agent, games: int = 200, seed: int = 0, most_moves: int | None = None) -> list[dict[str, Any]]:
    """Play held-out games concurrently, to their end or ``most_moves`` moves, and return them; a bar shows how many ended."""
    with Display() as screen:
        screen.phase(f"playing {games} held-out games", games)

        async def one(game: dict[str, Any]) -> dict[str, Any]:
            played = await play(agent, **game, most_moves=most_moves)
            screen.advance()
            return played

        return await asyncio.gather(*map(one, held_out_games(games, seed)))


def mean_and_margin(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half of its 95 % confidence interval, which is infinite for a single value."""
    margin = 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return statistics.fmean(values), margin


def describe(games: Sequence[Mapping[str, Any]]) -> str:
    """Return a line that summarises games."""
    mean, margin = mean_and_margin([game["score"] for game in games])
    tiles = Counter(game["max_tile"] for game in games)
    largest = ", ".join(f"{tile}: {tiles[tile] / len(games):.0%}" for tile in sorted(tiles, reverse=True))
    moves = sum(len(game["moves"]) for game in games)
    invalid = sum(invalid_share(game) * len(game["moves"]) for game in games) / moves
    return (
        f"{len(games)} games: score {mean:.0f} +- {margin:.0f}, {moves / len(games):.0f} moves, invalid {invalid:.1%}, "
        f"largest tile {statistics.fmean(game['max_tile'] for game in games):.0f} ({largest})"
    )


def main(
    name: Annotated[str, typer.Argument(help="random, reward, search, a model or a run folder.")] = str(MODEL),
    games: Annotated[int, typer.Option(min=1, help="Held-out games.")] = 200,
    temperature: Annotated[float, typer.Option(help="Sampling temperature of the model; 0: greedy.")] = 1.0,
    depth: Annotated[int, typer.Option(help="Depth of the search, in moves; the classic player's is 3.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the held-out games.")] = 0,
) -> None:
    """Play held-out games and print the results."""
    print(f"{name}: {describe(asyncio.run(measure(player(name, temperature, depth), games, seed)))}")


if __name__ == "__main__":
    typer.run(main)
