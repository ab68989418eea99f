"""Run the demo for several seeds and print the table of docs/results.md: python -m bench.demo_seeds --seeds 0 1 2"""

import argparse
import json
from pathlib import Path

from examples.email_search.train import run


def row(report: dict) -> str:
    """Return one line of the table: success before and after, sampled and greedy, with 95 % intervals."""
    cells = [str(report["seed"])]
    for temperature in (1.0, None):
        before, after = (
            next(it for it in report["evaluations"] if it["name"] == name and it["temperature"] == temperature)
            for name in ("before", "after")
        )
        cells += [shown(before), shown(after), f"{100 * (after['success'] - before['success']):+.1f}"]
    return "| " + " | ".join([*cells, str(report["steps"]), f"{report['seconds']:.0f}"]) + " |"


def shown(it: dict) -> str:
    low, high = it["interval"]
    return f"{it['success']:.1%} ({low:.1%} to {high:.1%})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=300, help="held-out tasks")
    parser.add_argument("--out", type=Path, default=Path("runs/demo-seeds"))
    options = parser.parse_args()
    for seed in options.seeds:
        run(seed=seed, run_dir=options.out / f"seed-{seed}", eval_tasks=options.tasks)
    reports = [json.loads((options.out / f"seed-{seed}" / "report.json").read_text()) for seed in options.seeds]
    print("| seed | T=1 before | T=1 after | points | greedy before | greedy after | points | steps | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for report in reports:
        print(row(report))
    rises = [100 * (it["after"]["success"] - it["before"]["success"]) for it in reports]
    print(f"\nmean rise at T=1: {sum(rises) / len(rises):.1f} points; start weights {reports[0]['start_weights']}")
