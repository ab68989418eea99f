"""Run the demo for several seeds and print the tables of docs/results.md: python -m bench.demo_seeds --seeds 0 1 2

With ``--judge scripted`` every seed is trained twice, on the reward from the known answer and on RULER's scores by
``bench/scripted_judge.py``, which is called over HTTP and sees no more than any judge.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from bench import scripted_judge
from bench.judge_server import judging_for_ruler
from bench.tables import table
from examples.email_search.train import run

HEAD = ["seed", "T=1 before", "T=1 after", "points", "greedy before", "greedy after", "points", "steps", "seconds"]
REWARD, JUDGE = "known answer", "scripted judge"


def row(report: dict[str, Any]) -> list[str]:
    """Return one line of the table: success before and after, sampled and greedy, with 95 % intervals."""
    cells = [str(report["seed"])]
    for temperature in (1.0, None):
        before, after = (evaluation(report, name, temperature) for name in ("before", "after"))
        cells += [with_interval(before), with_interval(after), f"{100 * (after['success'] - before['success']):+.1f}"]
    return [*cells, str(report["steps"]), f"{report['seconds']:.0f}"]


def evaluation(report: dict[str, Any], name: str, temperature: float | None) -> dict[str, Any]:
    """Return one of a report's evaluations."""
    return next(it for it in report["evaluations"] if (it["name"], it["temperature"]) == (name, temperature))


def with_interval(it: dict[str, Any]) -> str:
    """Return an evaluation's success rate with its interval."""
    low, high = it["interval"]
    return f"{it['success']:.1%} ({low:.1%} to {high:.1%})"


def compared(reports: dict[str, list[dict[str, Any]]]) -> str:
    """Return held-out success after training on each, by seed, and the means with their difference."""
    lines: list[list[str]] = []
    for name, temperature in (("T=1", 1.0), ("greedy", None)):
        after = {which: [evaluation(it, "after", temperature) for it in reports[which]] for which in (REWARD, JUDGE)}
        for report, *pair in zip(reports[REWARD], after[REWARD], after[JUDGE], strict=True):
            points = 100 * (pair[1]["success"] - pair[0]["success"])
            lines.append([name, str(report["seed"]), *map(with_interval, pair), f"{points:+.1f}"])
        means = [statistics.fmean(it["success"] for it in after[which]) for which in (REWARD, JUDGE)]
        lines.append([name, "mean", *(f"{it:.1%}" for it in means), f"{100 * (means[1] - means[0]):+.1f}"])
    return table(["held out", "seed", f"after: {REWARD}", f"after: {JUDGE}", "points"], lines)


def train(options: argparse.Namespace, folder: str, judge: str | None = None) -> list[dict[str, Any]]:
    """Train every seed; return the reports."""
    reports = []
    for seed in options.seeds:
        run_dir = options.out / f"{folder}{seed}"
        run(
            options.steps, seed, judge, run_dir, options.tasks, options.learning_rate, options.decay_steps
        )  # fmt: skip
        reports.append(json.loads((run_dir / "report.json").read_text()))
    return reports


def train_by_scripted_judge(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train every seed on the scores of a judge behind its own server."""
    with judging_for_ruler(scripted_judge.judge) as judge:
        return train(options, "judged-seed-", judge)


def main(options: argparse.Namespace) -> None:
    """Train and print."""
    reports = {REWARD: train(options, "seed-")}
    if options.judge:
        reports[JUDGE] = train_by_scripted_judge(options)
    for which, trained in reports.items():
        rises = [100 * (it["after"]["success"] - it["before"]["success"]) for it in trained]
        mean = statistics.fmean(rises)
        print(f"\ntrained on: {which}\n\n{table(HEAD, [row(report) for report in trained])}")
        print(f"\nmean rise at T=1: {mean:.1f} points; start weights {trained[0]['start_weights']}")
    if options.judge:
        print(f"\n{compared(reports)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--decay-steps", type=int, default=10)
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks")
    parser.add_argument("--judge", choices=["scripted"], help="train every seed on this judge's scores as well")
    parser.add_argument("--out", type=Path, default=Path("runs/demo-seeds"))
    main(parser.parse_args())
