"""Train the player of 2048: python -m examples.game_2048.train"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

import art_core as art

from .agent import Game2048Agent, play
from .evaluate import MODEL, describe, measure, player
from .tasks import reward, training_positions

POSITIONS = 320
"""From which training rollouts start."""


def run(
    model: str = str(MODEL), steps: int = 30, seed: int = 0, run_dir: Path | None = None, **settings: Any
) -> art.TrainResult:
    """Train on positions of games, by default with a reward per move; ``settings`` are further keywords of ``art.train``."""
    agent = Game2048Agent(model, strategy="deep_learning")

    async def play_on(task: dict[str, Any]) -> dict[str, Any]:
        return await play(agent, **task)

    settings = {
        "reward": reward,
        "tasks_per_step": 8,
        "group_size": 4,
        "learning_rate": 1e-3 if model == str(MODEL) else None,
        **settings,
    }
    return art.train_sync(
        play_on, training_positions(POSITIONS, seed), model=model, steps=steps, seed=seed, run_dir=run_dir, **settings
    )


def main(
    model: Annotated[str, typer.Option(help="The start model: a folder or a Hugging Face name.")] = str(MODEL),
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 30,
    seed: Annotated[int, typer.Option(help="Seed of positions and sampling.")] = 0,
    games: Annotated[int, typer.Option(min=1, help="Held-out games, played to the end before and after.")] = 200,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder.")] = None,
) -> None:
    """Train the player and print its results in whole held-out games before and after."""
    print(f"before: {describe(asyncio.run(measure(player(model), games)))}", flush=True)
    result = run(model, steps, seed, run_dir)
    print(f"after:  {describe(asyncio.run(measure(player(str(result.run_dir)), games)))}\n{result.run_dir}")


if __name__ == "__main__":
    typer.run(main)
