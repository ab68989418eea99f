"""Train by self-play and evaluate against two opponents: python -m examples.tic_tac_toe.train"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import art_core as art

from .agent import OPPONENTS, agent
from .evaluate import table
from .make_start import START
from .tasks import matches, reward, self_play

LEARNING_RATE = 5e-4


def run(
    model: str | Path = START, *, steps: int = 40, seed: int = 0, games: int = 200, run_dir: Path | None = None,
    **settings: Any,
) -> art.TrainResult:  # fmt: skip
    """Let the policy play itself; evaluate ``games`` against each opponent before and after, at temperature 1.

    ``settings`` are further keywords of ``art.train``.
    """
    if Path(model) == START:
        settings = {"learning_rate": LEARNING_RATE, **settings}
    return art.train_sync(
        agent, self_play(2000, seed), model=str(model), reward=reward, steps=steps, seed=seed, run_dir=run_dir,
        eval_tasks=[match for opponent in OPPONENTS for match in matches(games, opponent)] if games else None,
        **{"tasks_per_step": 12, "group_size": 8, "eval_temperatures": (1.0,), **settings},
    )  # fmt: skip


def main(
    model: Annotated[str, typer.Option(help="A folder, a Hugging Face name or tiny; default: the start model.")] = str(
        START
    ),
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of openings and sampling.")] = 0,
    games: Annotated[int, typer.Option(help="Evaluation games against each opponent, before and after.")] = 200,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder.")] = None,
) -> None:
    """Train by self-play and print wins, draws and losses before and after: some minutes on two cores."""
    result = run(model, steps=steps, seed=seed, games=games, run_dir=run_dir)
    for name, report in (("before", result.before), ("after", result.after)):
        if report is not None:
            print(f"{name}:\n{table(report)}")
    print(result.run_dir)


if __name__ == "__main__":
    typer.run(main)
