"""Train a pretrained model on third-party tasks: python -m examples.pretrained.train tools"""

import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

import art_core as art
from art_cli.summary import show
from art_core.types import Tasks

SUITES: dict[str, tuple[str, dict[str, Any]]] = {
    "tools": ("bfcl/simple", {}),
    "words": ("reasoning-gym/word_sequence_reversal", {"min_words": 2, "max_words": 4}),
}
"""The suite, and its options."""
STEPS = {"tools": 40, "words": 60}
TEMPERATURES = (0.6, 0.0)
"""Of the evaluations: that of training, and greedy."""


def run(
    suite: str, steps: int | None = None, seed: int = 0, run_dir: Path | None = None, eval_tasks: int = 200,
    model: str = "smollm2-135m", reward: Any = None, **settings: Any,
) -> art.TrainResult:  # fmt: skip
    """Train with the defaults of ``art.train``; ``settings`` are further keywords of it.

    With ``reward`` that is trained on, such as ``"ruler"``; success is always what the suite's own check says.
    """
    name, difficulty = SUITES[suite]
    tasks, held_out = art.tasks(name, **difficulty), art.tasks(name, split="test", **difficulty)
    return art.train_sync(
        tasks.agent(), tasks, model=model, reward=reward or tasks.reward, steps=steps or STEPS[suite], seed=seed, run_dir=run_dir,
        eval_tasks=held_out[:eval_tasks], eval_temperatures=TEMPERATURES, eval_reward=tasks.reward, **settings,
    )  # fmt: skip


def best_constant(tasks: Tasks) -> tuple[str, float]:
    """Return the answer that solves most of ``tasks`` if it is always given, and the share that it solves."""
    answers = sorted({str(task["entry"]["answer"]) for task in tasks})
    return max(((answer, _share_solved(tasks, answer)) for answer in answers), key=lambda pair: pair[1])


def _share_solved(tasks: Tasks, answer: str) -> float:
    return statistics.fmean(tasks.reward(art.Trajectory(task=task, calls=(), output=answer)) >= 1 for task in tasks)


def main(
    suite: Annotated[str, typer.Argument(help=f"{' or '.join(SUITES)}.")] = "tools",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; default: 40 for tools, 60 for words.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of tasks and sampling.")] = 0,
    eval_tasks: Annotated[int, typer.Option(help="Held-out tasks, measured before and after.")] = 200,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder.")] = None,
) -> None:
    """Train SmolLM2-135M and print held-out success before and after."""
    if suite not in SUITES:
        raise typer.BadParameter(f"choose one of {', '.join(SUITES)}", param_hint="SUITE")
    show(run(suite, steps, seed, run_dir, eval_tasks))
    name, difficulty = SUITES[suite]
    if name.startswith("reasoning-gym/"):
        answer, share = best_constant(art.tasks(name, split="test", **difficulty))
        print(f"the best constant answer, {answer!r}, would solve {share:.1%}")


if __name__ == "__main__":
    typer.run(main)
