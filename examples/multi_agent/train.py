"""Train the team with credit per node, or with one reward for all: python -m examples.multi_agent.train --credit node"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import art_core as art

from ..email_search.tasks import held_out_tasks, training_tasks
from .agent import build_agent
from .reward import one_for_all, per_node

CREDIT = {"node": per_node, "run": one_for_all}


def run(
    credit: Literal["node", "run"] = "node", *, model: str = "tiny", steps: int = 20, seed: int = 0,
    eval_tasks: int = 300, run_dir: Path | None = None, **settings: Any,
) -> art.TrainResult:  # fmt: skip
    """Train every node; measure held-out success before and after, at temperature 1.

    ``settings`` are further keywords of ``art.train``.
    """
    os.environ.setdefault("OPENAI_API_KEY", "unused: the policy answers")
    if model == "tiny":
        settings = {"learning_rate": 5e-4, **settings}
    return art.train_sync(
        build_agent(), training_tasks(500, seed), model=model, reward=CREDIT[credit], steps=steps, seed=seed,
        run_dir=run_dir, eval_tasks=held_out_tasks(eval_tasks) if eval_tasks else None,
        **{"eval_temperatures": (1.0,), **settings},
    )  # fmt: skip


def main(
    credit: Annotated[str, typer.Option(help=f"One of {', '.join(CREDIT)}.")] = "node",
    model: Annotated[str, typer.Option(help="tiny, a folder or a Hugging Face name.")] = "tiny",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of tasks and sampling.")] = 0,
    eval_tasks: Annotated[int, typer.Option(help="Held-out tasks, measured before and after.")] = 300,
    run_dir: Annotated[Path | None, typer.Option(help="Run folder.")] = None,
) -> None:
    """Train the team and print held-out success before and after: some minutes on two cores."""
    if credit not in CREDIT:
        raise typer.BadParameter(f"unknown credit {credit!r}; choose from {', '.join(CREDIT)}")
    result = run(credit, model=model, steps=steps, seed=seed, eval_tasks=eval_tasks, run_dir=run_dir)
    for name, report in (("before", result.before), ("after", result.after)):
        if report is not None:
            means = {
                node: sum(t.metrics.get(node, 0.0) for t in report.trajectories) / len(report.trajectories)
                for node in ("found", "read")
            }
            print(f"{name}: {report}; " + ", ".join(f"{node} {mean:.1%}" for node, mean in means.items()))
    print(result.run_dir)


if __name__ == "__main__":
    typer.run(main)
