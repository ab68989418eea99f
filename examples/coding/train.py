"""Train the agent of ``agent.py``: python -m examples.coding.train"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

import art_core as art

from .agent import write_function
from .reward import reward
from .tasks import held_out_tasks, training_tasks

START = Path(__file__).parent / "start_model"
"""A model with 0.9M parameters, made by ``make_start.py``."""


def run(
    steps: int = 40, seed: int = 0, model: str = str(START), run_dir: Path | None = None, eval_tasks: int = 200,
    **settings: Any,
) -> art.TrainResult:  # fmt: skip
    """Train on training tasks; evaluate on held-out ones, at temperature 1 and with the agent's own settings.

    ``settings`` are further keywords of ``art.train``.
    """
    os.environ.setdefault("OPENAI_API_KEY", "unused: the policy answers")
    settings = {"tasks_per_step": 16, "eval_temperatures": (1.0, None), **settings}
    if model == str(START):
        settings = {"learning_rate": 1e-3, **settings}
    return art.train_sync(
        write_function, training_tasks(1000, seed), model=model, reward=reward, steps=steps, seed=seed,
        run_dir=run_dir, eval_tasks=held_out_tasks(eval_tasks), **settings,
    )  # fmt: skip


def main(
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of tasks and sampling.")] = 0,
    model: Annotated[str, typer.Option(help="A model folder or a Hugging Face name.")] = str(START),
    eval_tasks: Annotated[int, typer.Option(help="Held-out tasks, measured before and after.")] = 200,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder.")] = None,
) -> None:
    """Train the agent and print held-out success before and after: some minutes on two cores."""
    result = run(steps, seed, model, run_dir, eval_tasks)
    print(f"before: {result.before}\nafter:  {result.after}\n{result.run_dir}")


if __name__ == "__main__":
    typer.run(main)
