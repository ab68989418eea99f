"""Train the agent of ``agent.py``: python -m examples.email_search.train"""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

import art_core as art

from .agent import build_agent
from .reward import reward
from .tasks import held_out_tasks, training_tasks


def run(
    steps: int = 30, seed: int = 0, judge: str | None = None, run_dir: Path | None = None, eval_tasks: int = 200,
    learning_rate: float = 1e-3, decay_steps: int = 10, **settings: Any,
) -> art.TrainResult:  # fmt: skip
    """Train on the reward from the known answer, or on RULER's scores by ``judge``; evaluate by the known answer.

    ``settings`` are further keywords of ``art.train``.
    """
    os.environ.setdefault("OPENAI_API_KEY", "unused: the policy answers")
    if judge:
        os.environ["ART_JUDGE"] = judge
    return art.train_sync(
        build_agent(), training_tasks(240, seed), model="tiny", reward="ruler" if judge else reward, steps=steps,
        learning_rate=learning_rate, decay_steps=decay_steps, seed=seed, run_dir=run_dir, eval_reward=reward,
        eval_tasks=held_out_tasks(eval_tasks), **{"eval_temperatures": (1.0, None), **settings},
    )  # fmt: skip


def main(
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 30,
    seed: Annotated[int, typer.Option(help="Seed of tasks and sampling.")] = 0,
    judge: Annotated[str | None, typer.Option(help="A judge's LiteLLM name; without it, the known answers.")] = None,
    eval_tasks: Annotated[int, typer.Option(help="Held-out tasks, measured before and after.")] = 200,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder.")] = None,
) -> None:
    """Train the agent and print held-out success before and after: some minutes on two cores."""
    result = run(steps, seed, judge, run_dir, eval_tasks)
    print(f"before: {result.before}\nafter:  {result.after}\n{result.run_dir}")


if __name__ == "__main__":
    typer.run(main)
