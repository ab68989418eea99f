"""Train a pretrained model on tasks that others wrote, with several recipes and seeds, and print the tables of docs/results.md.

    python -m bench.recipes bfcl --recipes default "temperature 1" --seeds 0 1 2 [--steps 40] [--out runs/recipes]

A recipe is what it changes in the defaults of ``art.train``. A run that is in ``--out`` already is not repeated, an interrupted
one is resumed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import art_core as art
from art_core.types import Tasks
from bench.demo_seeds import evaluation, shown
from bench.tables import table

RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    "temperature 1": {"temperature": 1.0},
    "rate 1e-4": {"learning_rate": 1e-4},
    "rate 1e-3": {"learning_rate": 1e-3},
    "decay": {"decay_steps": 10},
    "mean": {"advantage": "mean"},
    "dapo": {"loss": "dapo"},
    "KL": {"kl": 0.02},
    "dynamic sampling": {"dynamic_sampling": True},
    "all weights": {"lora_rank": 0},
}
SUITES: dict[str, tuple[str, dict[str, Any]]] = {
    "bfcl": ("bfcl/simple", {}),
    "words": ("reasoning-gym/word_sequence_reversal", {"min_words": 2, "max_words": 4}),
}
"""The suite, and its options."""
TEMPERATURES = (0.6, 0.0)
"""Of the evaluations: the default of training, and greedy."""
HELD_OUT = 200
HEAD = [
    "recipe",
    "seed",
    "T=0.6 before",
    "T=0.6 after",
    "greedy before",
    "greedy after",
    "entropy",
    "contrast",
    "seconds",
]


def train(suite: str, recipe: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train once, unless it is done; return the report."""
    name, difficulty = SUITES[suite]
    run_dir = options.out / f"{suite}-{recipe.replace(' ', '-')}-{seed}"
    if not (run_dir / "report.json").is_file():
        tasks, held_out = art.tasks(name, **difficulty), art.tasks(name, split="test", **difficulty)
        art.train_sync(
            tasks.agent(), tasks, model=options.model, reward=tasks.reward, steps=options.steps, seed=seed, run_dir=run_dir,
            eval_tasks=held_out[:HELD_OUT], eval_temperatures=TEMPERATURES, **RECIPES[recipe],
        )  # fmt: skip
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return json.loads((run_dir / "report.json").read_text()) | {"by_step": steps}


def row(recipe: str, report: dict[str, Any]) -> list[str]:
    """Return a line of the table; entropy and groups with contrast are means of the first and the last five steps."""
    cells = [recipe, str(report["seed"])]
    for temperature in TEMPERATURES:
        cells += [shown(evaluation(report, name, temperature)) for name in ("before", "after")]
    for name in ("entropy", "groups_with_contrast"):
        values = [step[name] for step in report["by_step"] if name in step]
        cells.append(f"{statistics.fmean(values[:5]):.2f} to {statistics.fmean(values[-5:]):.2f}" if values else "-")
    return [*cells, f"{report['seconds']:.0f}"]


def best_constant(tasks: Tasks) -> tuple[str, float]:
    """Return the answer that solves most of ``tasks`` if it is always given, and the share that it solves."""
    answers = sorted({str(task["entry"]["answer"]) for task in tasks})
    return max(((answer, share_solved(tasks, answer)) for answer in answers), key=lambda pair: pair[1])


def share_solved(tasks: Tasks, answer: str) -> float:
    """Return the share of ``tasks`` that ``answer`` solves."""
    return statistics.fmean(tasks.reward(art.Trajectory(task=task, calls=(), output=answer)) >= 1 for task in tasks)


def main(options: argparse.Namespace) -> None:
    """Train and print."""
    lines: list[Sequence[str]] = []
    for recipe in options.recipes:
        for seed in options.seeds:
            lines.append(row(recipe, train(options.suite, recipe, seed, options)))
            print(f"\n{table(HEAD, lines)}\n", flush=True)
    name, difficulty = SUITES[options.suite]
    held_out = art.tasks(name, split="test", **difficulty)
    if "entry" in held_out[0]:
        answer, share = best_constant(held_out)
        print(f"best constant answer: {answer!r}, {share:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["default"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"))
    main(parser.parse_args())
