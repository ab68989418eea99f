"""The command ``art improve``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from art_cli.arguments import load_agent, load_reward, load_tasks, parse_settings
from art_cli.dry_run import duration
from art_cli.main import AGENT, ENDED_EARLY, MAY_PASS, TASKS, Model, Reward, RunDir, Settings
from art_cli.resuming import quoted, resume_hint, same_command
from art_core.plugin_api import plural
from art_core.store.run_folder import new_run_dir
from art_gepa.command import load_reflector

if TYPE_CHECKING:
    from art_improve.improve import Contribution, Improvement

NOT_SETTABLE = (
    "reward", "model", "seed", "run_dir", "teacher", "trackers", "rollouts", "reflector", "max_cost", "held_out",
)  # fmt: skip
"""Keywords that ``--set`` refuses, because the command passes them itself."""


def improve(
    agent: Annotated[str, AGENT],
    tasks: Annotated[str, TASKS],
    held_out: Annotated[str, typer.Option(help="Tasks that show what prompts, teacher and GRPO each add; form as TASKS.")],
    reward: Reward = "ruler",
    model: Model = "tiny",
    rollouts: Annotated[int, typer.Option(min=1, help="The budget, without the rollouts of held-out tasks.")] = 2000,
    reflector: Annotated[
        str | None,
        typer.Option(help="Writes better prompts, as in `art optimize`. Without it, prompts stay as they are."),
    ] = None,
    max_cost: Annotated[
        float | None, typer.Option(help="End the search once the reflector has cost this many US dollars.")
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(help="A better model with the same tokenizer: a folder or Hugging Face name. Without it, only GRPO trains."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the tasks' order and of sampling.")] = 0,
    tracker: Annotated[list[str] | None, typer.Option(help="Where to log the training, such as wandb; repeatable.")] = None,
    forecast_only: Annotated[bool, typer.Option("--forecast", help="Say what it will cost, and stop.")] = False,
    run_dir: RunDir = None,
    set_: Settings = None,
) -> None:  # fmt: skip
    """Improve an agent on one budget: better prompts, then a teacher, then GRPO.

    The held-out tasks show what each contributed. After a first evaluation, it prints what everything will cost. Exit codes
    are those of `art train`.
    """
    from art_improve.improve import improve as start

    run_dir = run_dir or new_run_dir(f"improve-{Path(model).name}")
    console = Console(highlight=False, soft_wrap=True, markup=False)
    settings = parse_settings(set_ or [], NOT_SETTABLE)
    again = same_command(run_dir)
    with resume_hint(run_dir, again, "continues where it stopped"):
        work = start(
            load_agent(agent), load_tasks(tasks), model=model, reward=load_reward(reward), held_out=load_tasks(held_out),
            rollouts=rollouts, reflector=reflector and load_reflector(reflector), max_cost=max_cost, teacher=teacher,
            trackers=tracker or (), forecast_only=forecast_only, run_dir=run_dir, seed=seed, say=console.print,
            **settings,
        )  # fmt: skip
        result = asyncio.run(work)
    if stopped := result.stopped:
        console.print(f"training ended early: {stopped}; {again} continues, with other settings if you pass them")
        raise typer.Exit(MAY_PASS if stopped.may_pass else ENDED_EARLY)
    if forecast_only:
        console.print(f"{again} and without --forecast spends the rest")
    else:
        show(result, console)


def show(result: Improvement, console: Console) -> None:
    """Print what each lever contributed, and what to do with it."""
    table = Table("lever", "held out", "rollouts", "time", "reflector")
    for it in result.contributions:
        dollars = f"${it.dollars:.2f}" if it.dollars else "-"
        table.add_row(it.lever, change(it), f"{it.rollouts:,}", duration(it.seconds), dollars)
    console.print(table)
    expected = ", then ".join(duration(it.seconds) for it in result.forecasts)
    took = f"{plural(result.rollouts, 'rollout')}, {duration(result.seconds)}; forecast: {expected}"
    console.print(f"held out: {result.before} -> {result.after} ({took})")
    prompts = f" --prompts {quoted(result.prompts)}" if result.prompts else ""
    if prompts:
        console.print(f"better prompts: pass{prompts}, or put them into the agent")
    if result.weights:
        console.print(f"next: art gateway --model {quoted(result.weights)}{prompts}")


def change(contribution: Contribution) -> str:
    """Return what a lever contributed, with its 95 % interval."""
    difference = contribution.difference
    if difference is None:
        return "not scored"
    return shown(contribution.measure, difference.value, difference.interval)


def shown(measure: str, value: float, interval: tuple[float, float]) -> str:
    """Return a difference of success or of the reward, with its 95 % interval."""
    low, high = interval
    if measure == "success":
        return f"{100 * value:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"
    return f"reward {value:+.3f} ({low:+.3f} to {high:+.3f})"
