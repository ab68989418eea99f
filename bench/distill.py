"""Distillation beside GRPO on the demo's agent: rollouts until the student has 90 % of the teacher's success.

    python -m bench.distill --seeds 0 1 2

The teacher is the last checkpoint of a run by GRPO with another seed; the student starts from ``tiny``. Both ways use the demo's
settings, except for the loss and the number of steps.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import art_core as art
from bench.tables import table
from examples.email_search.agent import build_agent
from examples.email_search.reward import reward
from examples.email_search.tasks import held_out_tasks, training_tasks

SHARE = 0.9
"""Of the teacher's held-out success."""


def train(options: argparse.Namespace, folder: str, seed: int, steps: int, **settings: Any) -> dict[str, Any]:
    """Train, or read what was trained before, with an evaluation every ``options.every`` steps; return the report."""
    run_dir = options.out / folder
    if not (run_dir / "report.json").is_file():
        art.train_sync(
            build_agent(), training_tasks(240, seed), model="tiny", reward=reward, steps=steps, seed=seed, run_dir=run_dir,
            learning_rate=1e-3, decay_steps=10, keep_checkpoints=1, eval_tasks=held_out_tasks(options.tasks),
            eval_every=options.every, eval_temperatures=(1.0,), **settings,
        )  # fmt: skip
    return json.loads((run_dir / "report.json").read_text())


def curve(report: dict[str, Any]) -> dict[int, float]:
    """Return the held-out success after each evaluated step."""
    return {it["step"]: it["success"] for it in report["evaluations"]}


def reached(report: dict[str, Any], success: float) -> int | None:
    """Return the first evaluated step at which the success was at least this, or None."""
    return next((step for step, value in sorted(curve(report).items()) if value >= success), None)


def main(options: argparse.Namespace) -> None:
    """Train and print."""
    os.environ.setdefault("OPENAI_API_KEY", "unused: the policy answers")
    target = train(options, "teacher", options.teacher_seed, options.steps)
    teacher = max((options.out / "teacher" / "checkpoints").glob("step-*"))
    wanted = SHARE * target["after"]["success"]
    print(f"teacher {target['after']['success']:.1%}, wanted {wanted:.1%}")
    rows = []
    for seed in options.seeds:
        ways = {
            "grpo": train(options, f"grpo-{seed}", seed, options.steps),
            "distill": train(
                options, f"distill-{seed}", seed, options.distill_steps, loss="distill", teacher=str(teacher)
            ),
        }
        for name, report in ways.items():
            step = reached(report, wanted)
            values = " ".join(f"{step}: {value:.1%}" for step, value in sorted(curve(report).items()))
            rows.append([str(seed), name, "not reached" if step is None else str(64 * step), values])
    print(table(["seed", "loss", "rollouts", "success after each evaluated step"], rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--teacher-seed", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30, help="of the teacher and of GRPO")
    parser.add_argument("--distill-steps", type=int, default=15)
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks")
    parser.add_argument("--out", type=Path, default=Path("runs/distill"))
    main(parser.parse_args())
