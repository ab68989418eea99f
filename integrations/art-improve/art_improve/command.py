"""The command ``art improve``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from art_cli.arguments import load_agent, load_object, load_reward, load_tasks, parse_settings
from art_cli.main import AGENT, TASKS, Model, Reward, RunDir, Settings, resume_hint
from art_core.plugin_api import plural
from art_core.store.run_folder import new_run_dir
from art_gepa.command import is_function
from art_improve.forecast import duration

if TYPE_CHECKING:
    from art_improve.improve import Improvement

NOT_SETTABLE = (
    "reward", "model", "steps", "seed", "run_dir", "teacher", "loss", "eval_tasks", "eval_every", "plugins", "allow_changes",
)  # fmt: skip
"""Keywords of ``art.train`` that ``--set`` refuses, because the command passes them itself."""


def improve(
    agent: Annotated[str, AGENT],
    tasks: Annotated[str, TASKS],
    held_out: Annotated[str, typer.Option(help="Tasks that measure each lever, in the same form as TASKS.")],
    reward: Reward = "ruler",
    model: Model = "tiny",
    rollouts: Annotated[int, typer.Option(min=1, help="The budget, without the rollouts of held-out tasks.")] = 2000,
    reflector: Annotated[
        str | None,
        typer.Option(help="Writes better prompts, as of `art optimize`; without it, prompts stay as they are."),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="A better model with the same tokenizer: a folder or a Hugging Face name; without it, only GRPO trains."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the tasks' order and of sampling.")] = 0,
    forecast_only: Annotated[bool, typer.Option("--forecast", help="Say what it will cost, and stop.")] = False,
    run_dir: RunDir = None,
    set_: Settings = None,
) -> None:
    """Improve an agent on one budget: better prompts first, then a teacher and GRPO in turns, whichever gains more per rollout.

    The held-out tasks measure what each contributed. What it will cost is printed after a first measurement.
    """
    from art_improve.improve import improve as start

    run_dir = run_dir or new_run_dir(f"improve-{Path(model).name}")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    settings = parse_settings(set_ or [], NOT_SETTABLE)
    loaded = load_agent(agent), load_tasks(tasks)
    again = f"the same command with --run-dir {run_dir}"
    with resume_hint(run_dir, again, "continues where it stopped"):
        work = start(
            *loaded, model=model, reward=load_reward(reward), held_out=load_tasks(held_out), rollouts=rollouts,
            reflector=load_object(reflector) if reflector and is_function(reflector) else reflector, teacher=teacher,
            forecast_only=forecast_only, run_dir=run_dir, seed=seed, say=console.print, **settings,
        )  # fmt: skip
        result = asyncio.run(work)
    if forecast_only:
        console.print(f"to spend the rest: {again}, without --forecast")
    else:
        show(result, console)


def show(result: Improvement, console: Console) -> None:
    """Print what each lever contributed, and what to do with it."""
    table = Table("lever", "held-out success", "rollouts", "time", "reflector")
    for it in result.contributions:
        rise = f"{100 * it.value:+.1f} ± {100 * it.margin:.1f} points"
        table.add_row(
            it.lever, rise, f"{it.rollouts:,}", duration(it.seconds), f"${it.dollars:.2f}" if it.dollars else "-"
        )
    console.print(table)
    expected = ", then ".join(duration(it.seconds) for it in result.forecasts)
    took = f"{plural(result.rollouts, 'rollout')}, {duration(result.seconds)}; forecast: {expected}"
    console.print(f"held out: {result.before:.1%} -> {result.after:.1%} ({took})")
    if result.stopped:
        console.print(f"training ended early: {result.stopped}")
    if result.prompts:
        console.print(f"better prompts: {result.prompts}; pass them with --prompts, or put them into the agent")
    if result.weights:
        console.print(f"better weights: art gateway --run-dir {result.weights}")
