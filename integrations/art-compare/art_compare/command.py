"""The command ``art compare``."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from art_cli.resuming import quoted
from art_cli.summary import print_trajectory
from art_compare.comparison import Comparison, Difference, conditions
from art_compare.comparison import compare as compare_sides
from art_compare.measures import MEASURES
from art_compare.prices import read_prices
from art_compare.sides import names_of
from art_compare.statistics import FEW
from art_core.errors import ArtError
from art_core.plugin_api import plural, printable, task_input

FAILED, NOT_SHOWN = 1, 3
FLIPS_SHOWN = 5
TASK_CHARS = 100


def compare(
    sides: Annotated[
        list[str],
        typer.Argument(
            help="Run folders, each [NAME=]FOLDER[@EVALUATION]. Each is compared with the first; a single one is compared "
            "before and after training. With --agent, a side may also be live, a model, or MODEL@ADDRESS."
        ),
    ],
    gate: Annotated[
        str | None,
        typer.Option(
            help="Conditions that every side but the first must meet: 'success >= live - 0.02, cost <= 0.5 * live'. "
            "Seconds are comparable only if both sides ran under the same load."
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 3 if there are too few tasks to show that the gate holds.")
    ] = False,
    price: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=PROMPT/SAMPLED in US dollars per million tokens, for the cost of a side; repeatable. "
            "LiteLLM, if installed, lists the prices of live calls."
        ),
    ] = None,
    temperature: Annotated[
        str | None,
        typer.Option(
            help="Temperature of the evaluations: a number, or own for the agent's own; default: what all sides have."
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(help="Evaluate the sides that have no evaluation yet with this agent, --tasks and --reward."),
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Their tasks, as for `art eval`.")] = None,
    reward: Annotated[str, typer.Option(help="Their reward, as for `art eval`.")] = "ruler",
    transcripts: Annotated[int, typer.Option(min=0, help="Tasks that flipped to print in full, lost ones first.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare models on the same tasks, and decide whether one may replace another.

    Exit codes: 0: the gate holds, or the tasks don't show that it fails; 1: it fails; 2: nothing to compare; 3: with --strict,
    too few tasks to show that it holds.
    """
    if bool(agent) != bool(tasks):
        raise typer.BadParameter("pass --agent and --tasks together: the agent is evaluated on the tasks")
    try:
        chosen = float(temperature) if temperature not in (None, "own") else temperature
        prices = read_prices(price or [])
        if agent and tasks:
            from art_compare.measuring import Experiment, find_missing

            own = chosen if isinstance(chosen, float) else None
            if missing := find_missing(sides, own):
                # What would be refused in the end is refused before anything is measured, which may cost money.
                conditions(names_of(sides, {spec: it.name for spec, it in missing.items()}), gate, prices)
                sides = Experiment(agent, tasks, reward, own).measured(sides, missing, _plainly(Console(stderr=True)))
        comparison = compare_sides(*sides, gate=gate, temperature=chosen, prices=prices)
        verdicts = comparison.verdicts
    except (ArtError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if json_:
        print(json.dumps(comparison.as_json()))  # noqa: T201 - the command's result
    else:
        _print(comparison, transcripts)
    states = {verdict.state for verdict in verdicts}
    if "fails" in states:
        raise typer.Exit(FAILED)
    if strict and "not shown" in states:
        raise typer.Exit(NOT_SHOWN)


def _print(comparison: Comparison, transcripts: int) -> None:
    console = Console()
    say = _plainly(console)
    console.print(_table(comparison))
    own = comparison.sides[0].temperature
    at = "the agents' own temperature" if own is None else f"temperature {own:g}"
    say(f"{plural(len(comparison.keys), 'task')} that all sides have, {at}; intervals of 95 %, over the tasks")
    for side in comparison.sides:
        if rest := len(side.trajectories) - len(comparison.keys):
            say(f"{side.name} has {plural(rest, 'task')} more, left out")
    if len(comparison.keys) < FEW:
        say(f"with fewer than {FEW} tasks the intervals are too narrow, except those of success")
    rewards = {side.reward for side in comparison.sides}
    if len(rewards) > 1:
        say(f"scored by different rewards: {', '.join(sorted(map(str, rewards)))}")
    for number, side in enumerate(comparison.sides[1:], 1):
        _print_flips(comparison, number, side.name, transcripts, console)
    for verdict in comparison.verdicts:
        show = MEASURES[verdict.condition.split()[0]].show
        advice = f": {verdict.advice}" if verdict.advice else ""
        bound = f"{show(verdict.value)}, the bound is {show(verdict.bound)}"
        say(f"{verdict.state.upper()}  {verdict.side}: {verdict.condition}  ({bound}){advice}")
    say(f"next: {_next(comparison)}")


def _next(comparison: Comparison) -> str:
    first = comparison.sides[0].name
    if not comparison.conditions:
        known = all(comparison.value("success", number) is not None for number in range(len(comparison.sides)))
        gate = f'--gate "{"success" if known else "reward"} >= {first} - 0.02" decides by a bound, '
        comparable = len({side.reward for side in comparison.sides}) == 1
        return f"{gate * comparable}--transcripts 3 shows tasks that flipped"
    sides = dict.fromkeys(verdict.side for verdict in comparison.verdicts)
    holding = [side for side in sides if all(it.state == "holds" for it in comparison.verdicts if it.side == side)]
    if holding:
        return f"step 6 of docs/howto/own-model.md gives {' or '.join(holding)} a share of the conversations"
    every = f"art view {quoted(comparison.sides[-1].run_dir)} (with art-server)"
    flips = [comparison.flips(number) for number in range(1, len(comparison.sides))]
    flipped = any(it.lost or it.won for it in flips)
    return "--transcripts 3 shows tasks that flipped" if flipped else f"{every} shows every rollout"


def _plainly(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _table(comparison: Comparison) -> Table:
    first, *others = (side.name for side in comparison.sides)
    table = Table("per task", first)
    for name in others:
        table.add_column(name)
        table.add_column("difference")
    for measure, how in MEASURES.items():
        values = [comparison.value(measure, number) for number in range(len(comparison.sides))]
        known = [number for number, value in enumerate(values) if value is not None]
        if not known:
            continue
        row = ["-" if values[0] is None else how.show(values[0])]
        for number, value in enumerate(values[1:], 1):
            row += ["-" if value is None else how.show(value), _shown(comparison.difference(measure, number), measure)]
        counted = len(comparison.columns(measure, *known))
        table.add_row(measure if counted == len(comparison.keys) else f"{measure} ({plural(counted, 'task')})", *row)
    return table


def _shown(difference: Difference | None, measure: str) -> str:
    if difference is None:
        return "-"
    how = MEASURES[measure]
    numbers = [difference.value, *difference.interval]
    value, low, high = (f"{100 * it:+.1f}" if how.points else f"{it:+.3g}" for it in numbers)
    p = f", p = {difference.p:.2g}" if difference.p is not None and measure == "success" else ""
    return f"{value}{' points' if how.points else ''} ({low} to {high}){p}"


def _print_flips(comparison: Comparison, number: int, name: str, transcripts: int, console: Console) -> None:
    flips, say = comparison.flips(number), _plainly(console)
    if not flips.lost and not flips.won:
        return
    first = comparison.sides[0].name
    say(f"{name} solved {plural(len(flips.won), 'task')} that {first} did not, and lost {len(flips.lost)}")
    for sign, keys in (("-", flips.lost), ("+", flips.won)):
        for key in keys[:FLIPS_SHOWN]:
            task = asked(comparison.trajectories(key)[0].task)
            say(f"  {sign} {task[:TASK_CHARS]}{' ...' * (len(task) > TASK_CHARS)}")
        if len(keys) > FLIPS_SHOWN:
            say(f"  {sign} and {len(keys) - FLIPS_SHOWN} more: --json has all")
    for key in (*flips.lost, *flips.won)[:transcripts]:
        print_trajectory(comparison.sides[0].trajectories[key], first, console)
        print_trajectory(comparison.sides[number].trajectories[key], f"{name}, the same task", console)


def asked(task: Any) -> str:
    """Return what a task asks in one line; of a conversation, the last message."""
    question = task_input(task)
    if isinstance(question, dict) and isinstance(messages := question.get("messages"), list) and messages:
        question = messages[-1].get("content") if isinstance(messages[-1], dict) else messages[-1]
    return " ".join((question if isinstance(question, str) else json.dumps(question, ensure_ascii=False)).split())
