"""Train a pretrained model on third-party tasks, with several recipes and seeds, and print the tables of docs/results.md.

    python -m bench.recipes tools --recipes default "temperature 1" --seeds 0 1 2 [--steps 40] [--out runs/recipes]

A recipe is what it changes in the defaults of ``art.train``. A run that is in ``--out`` already is not repeated, an interrupted
one is resumed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench import word_judge
from bench.demo_seeds import evaluation, with_interval
from bench.judge_server import judging_for_ruler
from bench.tables import table
from examples.pretrained.train import STEPS, SUITES, TEMPERATURES, run

MODEL = "smollm2-135m"
JUDGED = "RULER"
"""On the scores of RULER, whose judge is a script behind its own server that sees no more than any judge. For words only."""
RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    "temperature 0.6": {"temperature": 0.6},
    "temperature 1": {"temperature": 1.0},
    "rate 1e-4": {"learning_rate": 1e-4},
    "rate 1e-3": {"learning_rate": 1e-3},
    "no decay": {"decay_steps": 0},
    "mean": {"advantage": "mean"},
    "dapo": {"loss": "dapo"},
    "KL": {"kl": 0.02},
    "dynamic sampling": {"dynamic_sampling": True},
    "groups of 16": {"tasks_per_step": 4, "group_size": 16},
    "all weights": {"lora_rank": 0},
    JUDGED: {"reward": "ruler"},
}
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


def train(recipe: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train once, unless it is done; return the report with the metrics of every step."""
    run_dir = options.out / folder_name(recipe, seed, options)
    report = run_dir / "report.json"
    if not (report.is_file() and json.loads(report.read_text())["after"]):
        with judging_for_ruler(word_judge.judge) if recipe == JUDGED else nullcontext():
            run(options.suite, options.steps, seed, run_dir, model=options.model, **RECIPES[recipe])
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return json.loads(report.read_text()) | {"by_step": steps}


def folder_name(recipe: str, seed: int, options: argparse.Namespace) -> str:
    """Return the name of a run's folder, with the model and the steps if they differ from the defaults."""
    name = f"{options.suite}-{recipe.replace(' ', '-')}-{seed}"
    if options.model != MODEL:
        name += f"-{quote(options.model, safe='')}"
    return name if options.steps == STEPS[options.suite] else f"{name}-{options.steps}-steps"


def row(recipe: str, report: dict[str, Any]) -> list[str]:
    """Return a line of the table; entropy and groups with contrast are means of the first and the last five steps."""
    cells = [recipe, str(report["seed"])]
    for temperature in TEMPERATURES:
        cells += [with_interval(evaluation(report, name, temperature)) for name in ("before", "after")]
    for name in ("entropy", "groups_with_contrast"):
        values = [step[name] for step in report["by_step"] if name in step]
        cells.append(f"{statistics.fmean(values[:5]):.2f} to {statistics.fmean(values[-5:]):.2f}" if values else "-")
    return [*cells, f"{report['seconds']:.0f}"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["default"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"))
    options = parser.parse_args(arguments)
    if JUDGED in options.recipes and options.suite != "words":
        parser.error(f"the recipe {JUDGED} is for words: its judge can't grade {options.suite}")
    options.steps = options.steps or STEPS[options.suite]
    return options


def main(options: argparse.Namespace) -> None:
    """Train and print."""
    lines: list[Sequence[str]] = []
    for recipe in options.recipes:
        for seed in options.seeds:
            lines.append(row(recipe, train(recipe, seed, options)))
            print(f"\n{table(HEAD, lines)}\n", flush=True)


if __name__ == "__main__":
    main(parse())
