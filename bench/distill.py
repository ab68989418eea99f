"""Distillation beside GRPO on the demo's agent: rollouts until the student has 90 % of the teacher's success.

    python -m bench.distill --seeds 0 1 2

The teacher is the last checkpoint of a run by GRPO with another seed; the student starts from ``tiny``. GRPO uses the demo's
settings, 8 rollouts of 8 tasks a step. A distillation needs no contrast within groups, so its steps are smaller: 2 rollouts of 16
tasks, at twice the learning rate.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from art_core.store.run_folder import last_checkpoint
from bench.tables import table
from examples.email_search.train import run

SHARE = 0.9
"""Of the teacher's held-out success."""

GRPO = {"learning_rate": 1e-3, "decay_steps": 10, "tasks_per_step": 8, "group_size": 8, "eval_every": 5}
DISTILL = {
    "loss": "distill", "learning_rate": 2e-3, "decay_steps": 8, "tasks_per_step": 16, "group_size": 2, "eval_every": 3,
}  # fmt: skip

SIZES = ("learning_rate", "decay_steps", "tasks_per_step", "group_size")
"""Settings in the name of a run's folder."""


def train(options: argparse.Namespace, folder: str, seed: int, steps: int, **settings: Any) -> Path:
    """Train unless a run with these settings has finished; return its folder."""
    sizes = [steps, *map(settings.get, SIZES), options.tasks]
    run_dir = options.out / "-".join([folder, *(f"{value:g}" for value in sizes)])
    if not (run_dir / "report.json").is_file():
        run(
            steps,
            seed,
            run_dir=run_dir,
            eval_tasks=options.tasks,
            eval_temperatures=(1.0,),
            keep_checkpoints=1,
            **settings,
        )
    return run_dir


def curve(run_dir: Path) -> dict[int, float]:
    """Return the held-out success after each evaluated step, in order."""
    report = json.loads((run_dir / "report.json").read_text())
    return dict(sorted((it["step"], it["success"]) for it in report["evaluations"]))


def main(options: argparse.Namespace) -> None:
    """Train and print."""
    taught = train(options, f"teacher-{options.teacher_seed}", options.teacher_seed, options.steps, **GRPO)
    teacher, success = last_checkpoint(taught), curve(taught)[options.steps]
    wanted = SHARE * success
    print(f"teacher {success:.1%}, wanted {wanted:.1%}")
    rows = []
    for seed in options.seeds:
        runs = {
            "grpo": train(options, f"grpo-{seed}", seed, options.steps, **GRPO),
            "distill": train(
                options, f"distill-{seed}-{taught.name}", seed, options.distill_steps, teacher=str(teacher), **DISTILL
            ),
        }
        for (name, run_dir), settings in zip(runs.items(), (GRPO, DISTILL), strict=True):
            found, each = curve(run_dir), settings["tasks_per_step"] * settings["group_size"]
            step = next((step for step, value in found.items() if value >= wanted), None)
            values = " ".join(f"{each * step}: {value:.1%}" for step, value in found.items())
            rows.append([str(seed), name, "not reached" if step is None else str(each * step), values])
    print(table(["seed", "loss", "rollouts", "success after so many rollouts"], rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--teacher-seed", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30, help="of the teacher and of GRPO")
    parser.add_argument("--distill-steps", type=int, default=15)
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks")
    parser.add_argument("--out", type=Path, default=Path("runs/distill"))
    main(parser.parse_args())
