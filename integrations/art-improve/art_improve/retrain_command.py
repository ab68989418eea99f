"""The command ``art retrain``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from art_cli.arguments import load_agent, load_reward, load_tasks, parse_settings
from art_cli.dry_run import duration
from art_cli.main import AGENT, ENDED_EARLY, MAY_PASS, Reward, Settings
from art_cli.resuming import quoted, resume_hint
from art_core.plugin_api import plural
from art_core.types import JsonDict
from art_improve.command import shown

if TYPE_CHECKING:
    from art_improve.history import Round

REJECTED = 1
NOT_SETTABLE = (
    "reward", "model", "steps", "seed", "run_dir", "trackers", "tasks", "held_out", "gate", "strict", "share", "at_least",
    "restart", "redact",
)  # fmt: skip
"""Keywords that ``--set`` refuses, because the command passes them itself."""
EXIT_CODES = {"accepted": 0, "rejected": REJECTED, "stopped": ENDED_EARLY, "training": MAY_PASS}


def retrain(
    agent: Annotated[str, AGENT],
    traffic: Annotated[
        str, typer.Argument(help="What users asked: the run folder of `art gateway`, or another source of `art tasks from`.")
    ],
    reward: Reward = "ruler",
    model: Annotated[
        str, typer.Option(help="What the first round begins with: tiny, a model folder, a Hugging Face name or a run folder.")
    ] = "tiny",
    tasks: Annotated[
        str | None, typer.Option(help="Tasks that the model was trained on before the first round, so that they aren't new.")
    ] = None,
    held_out: Annotated[
        str | None, typer.Option(help="Held-out tasks from before the first round; they are never trained on.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of a round.")] = 20,
    gate: Annotated[
        str | None,
        typer.Option(help="Conditions for the new weights, as of `art compare`; default: 'success >= current'."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Accept only if the tasks show that the gate holds, beyond chance.")
    ] = False,
    share: Annotated[float, typer.Option(help="Share of the new conversations to hold out.")] = 0.2,
    at_least: Annotated[int, typer.Option(min=1, help="With fewer new training tasks, do nothing.")] = 20,
    restart: Annotated[bool, typer.Option("--restart", help="Give up an interrupted round, and begin a new one.")] = False,
    redact: Annotated[bool, typer.Option("--redact", help="Replace secrets and personal data by tags.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the tasks' order and of sampling.")] = 0,
    tracker: Annotated[list[str] | None, typer.Option(help="Where to log the training, such as wandb; repeatable.")] = None,
    run_dir: Annotated[Path, typer.Option(help="Folder of all rounds.")] = Path("runs/rounds"),
    set_: Settings = None,
) -> None:  # fmt: skip
    """Train on what users asked since the last round, and keep the new weights if held-out tasks allow it.

    Schedule it: each call is one round from the weights that were accepted last, and does nothing with too few new tasks.
    RUN_DIR/current is a link to these weights; `art gateway --upstream mine=RUN_DIR/current` offers them to users.

    Exit codes: 0: accepted, or nothing to do; 1: rejected, or an error; 3: stopped; 75: interrupted, the next call continues.
    """
    from art_improve.rounds import retrain as start

    run_dir = run_dir.expanduser()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    settings = parse_settings(set_ or [], NOT_SETTABLE)
    with resume_hint(run_dir, "the same command", "continues the round; with --restart, it begins another"):
        work = start(
            load_agent(agent), traffic, model=model, reward=load_reward(reward), tasks=load_tasks(tasks) if tasks else (),
            held_out=load_tasks(held_out) if held_out else (), steps=steps, gate=gate, strict=strict, share=share,
            at_least=at_least, restart=restart, redact=redact, run_dir=run_dir, seed=seed, trackers=tracker or (),
            say=console.print, **settings,
        )  # fmt: skip
        round_ = asyncio.run(work)
    if round_ is not None:
        show(round_, run_dir, console.print)
        raise typer.Exit(EXIT_CODES[round_.state])


def show(round_: Round, run_dir: Path, say: Callable[[str], None]) -> None:
    """Print what a round changed, where the accepted weights are, and what to do next."""
    from art_improve.history import CURRENT, History

    history, link, run = History(run_dir), run_dir / CURRENT, run_dir / round_.name
    for line in lines(round_):
        say(line)
    if round_.state == "accepted":
        say(f"{link} leads to it; a gateway with --upstream mine={quoted(link)} offers it to users")
    elif history.current is not None:
        say(f"{link} still leads to {history.current}")
    if round_.state == "rejected":
        lost = "Read tasks that it lost. Its training tasks stay new for the next call."
        say(f"next: art compare {quoted(run)} --transcripts 3  # {lost}")
    say(f"next: art view {quoted(run_dir)}  # See all rounds (needs art-server).")


def lines(it: Round) -> Iterator[str]:
    """Yield what a round trained on, what it changed, and what became of it."""
    yield f"{it.name}  {time.strftime('%Y-%m-%d %H:%M', time.localtime(it.began))}  {it.state}"
    judge = f", ${it.judge_cost:.2f} for the judge" if it.judge_cost else ""
    tasks = f"{plural(it.new, 'new task')} and {it.older} older"
    yield f"  {tasks}, {plural(it.rollouts, 'rollout')}, {duration(it.seconds)} of training{judge}"
    if it.before and it.after:
        by = f", {shown(it.measure, it.difference, it.interval)}" if it.difference is not None and it.interval else ""
        yield f"  {plural(it.held_out, 'held-out task')}: {_mean(it.before)} -> {_mean(it.after)}{by}"
    if it.why:
        yield f"  {it.why}"


def _mean(report: JsonDict) -> str:
    return f"{report['success']:.1%}" if report["counts_successes"] else f"{report['success']:.3f}"
