"""``art improve`` beside GRPO alone, with as many rollouts, on examples.

    python -m bench.improve --seeds 0 1 2

The model is ``tiny``. The teacher is the last checkpoint of a run by GRPO with another seed, of twice the budget. The suite
``poet`` is the mailbox agent with a system prompt that says nothing of its task, and a reflector that knows a good one; the other
suites have no reflector.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import art_core as art
from art_core.store.run_folder import last_checkpoint
from art_improve import Improvement, improve
from art_improve.command import change
from bench.tables import table
from examples.email_search import agent as mailbox
from examples.email_search.reward import reward as mailbox_reward
from examples.email_search.tasks import SYSTEM_PROMPT, held_out_tasks, training_tasks
from examples.multi_agent.agent import build_agent as build_team
from examples.multi_agent.reward import one_for_all

USELESS = "You are a poet. " * 30
TEACHER_SEED = 9


@dataclass(frozen=True)
class Suite:
    """An example, and how it is improved."""

    build: Callable[[], object]
    reward: Callable[..., Any]
    budget: int
    settings: dict[str, Any]
    reflector: Callable[[Any], str] | None = None
    prompt: str = SYSTEM_PROMPT


def knows(prompt: Any) -> str:
    """Return the system prompt that the model was made with in place of the useless one, and other texts as they are."""
    old = prompt.split("```")[1].strip()
    return f"```\n{SYSTEM_PROMPT if USELESS.strip() in old else old}\n```"


SUITES = {
    "mailbox": Suite(mailbox.build_agent, mailbox_reward, 960, {"learning_rate": 1e-3}),
    "poet": Suite(mailbox.build_agent, mailbox_reward, 960, {"learning_rate": 1e-3}, knows, USELESS),
    "team": Suite(build_team, one_for_all, 960, {"learning_rate": 5e-4}),
}
"""The rates are the examples' own."""


def trained(suite: Suite, seed: int, budget: int, run_dir: Path, **settings: Any) -> Path:
    """Train with GRPO alone unless it is done already; return the run folder."""
    if not (run_dir / "report.json").is_file():
        art.train_sync(
            suite.build(), training_tasks(500, seed), model="tiny", reward=suite.reward, steps=budget // 64, seed=seed,
            run_dir=run_dir, **suite.settings, **settings,
        )  # fmt: skip
    return run_dir


def teacher_of(name: str, out: Path) -> Path:
    """Return a checkpoint that GRPO trained on twice the budget, with the example's own prompt."""
    suite = SUITES[name]
    checkpoint = last_checkpoint(trained(suite, TEACHER_SEED, 2 * suite.budget, out / name / "teacher", decay_steps=10))
    assert checkpoint is not None
    return checkpoint


def improved(name: str, seed: int, options: argparse.Namespace, teacher: Path) -> Improvement:
    """Improve a suite's agent."""
    suite = SUITES[name]
    return asyncio.run(
        improve(
            suite.build(), training_tasks(500, seed), model="tiny", reward=suite.reward, held_out=held_out_tasks(options.tasks),
            rollouts=suite.budget, reflector=suite.reflector, teacher=str(teacher), seed=seed,
            run_dir=options.out / name / f"improve-{seed}-{options.tasks}", decay_steps=5, **suite.settings,
        )
    )  # fmt: skip


def alone(name: str, seed: int, options: argparse.Namespace) -> float:
    """Return the held-out success after GRPO alone, with as many rollouts."""
    suite, run_dir = SUITES[name], options.out / name / f"alone-{seed}-{options.tasks}"
    trained(suite, seed, suite.budget, run_dir, decay_steps=5, eval_tasks=held_out_tasks(options.tasks))
    return json.loads((run_dir / "report.json").read_text())["after"]["success"]


def short(report: str) -> str:
    """Return the success of a report, without its interval."""
    return report.removeprefix("success ").partition(" ")[0]


def main(options: argparse.Namespace) -> None:
    """Measure and print."""
    os.environ.setdefault("OPENAI_API_KEY", "unused: the policy answers")
    rows = []
    for name in options.suites:
        mailbox.SYSTEM_PROMPT = SYSTEM_PROMPT
        teacher = teacher_of(name, options.out)
        mailbox.SYSTEM_PROMPT = SUITES[name].prompt
        for seed in options.seeds:
            result, other = improved(name, seed, options, teacher), alone(name, seed, options)
            levers = "; ".join(f"{it.lever}, {it.rollouts}: {change(it)}" for it in result.contributions)
            rows.append(
                [
                    name, str(seed), short(result.before), f"{other:.1%}", short(result.after), levers,
                    f"{result.seconds:.0f} / {', '.join(f'{it.seconds:.0f}' for it in result.forecasts)}",
                ]
            )  # fmt: skip
            print(table(HEAD, rows), flush=True)


HEAD = [
    "suite",
    "seed",
    "start",
    "GRPO alone",
    "improve",
    "rollouts and contribution of each lever",
    "seconds / forecast",
]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", default=[*SUITES], metavar="SUITE", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=200, help="held-out tasks")
    parser.add_argument("--out", type=Path, default=Path("runs/improve"))
    arguments = parser.parse_args()
    if unknown := set(arguments.suites) - SUITES.keys():
        parser.error(f"unknown suites: {', '.join(sorted(unknown))}")
    main(arguments)
