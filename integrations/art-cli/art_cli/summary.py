"""What is printed after a run: evaluations before and after with their intervals, and readable trajectories."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from art_cli.change import FEW, paired_change, results
from art_cli.hints import hints_of
from art_cli.next_steps import Advice, next_steps
from art_cli.resuming import quoted
from art_core import Report, TrainResult
from art_core.plugin_api import plural, printable
from art_core.store import Store
from art_core.store.run_folder import store_file
from art_core.types import JsonDict, Trajectory

SHORTENED = 600
"""Characters of a message that are shown."""


def show(result: TrainResult) -> None:
    """Print what changed and what to do next, and draw the chart if matplotlib is installed."""
    from art_cli.chart import draw

    console, hints = Console(), hints_of(result.run_dir, result.report)
    print_result(result, console, hints)
    run_dir = quoted(result.run_dir)
    can_draw = importlib.util.find_spec("matplotlib") is not None
    lines = [f"chart: {draw(result.run_dir)}" if can_draw else "no chart: pip install matplotlib"]
    lines += [f"next: {command}  # {text}" if command else f"next: {text}" for text, command in advice(result, hints)]
    lines.append(f"next: art view {run_dir} (with art-server) shows it in the browser, art audit {run_dir} checks it")
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_result(result: TrainResult, console: Console, hints: Sequence[str]) -> None:
    """Print the evaluations, one trajectory before and after training, hints and costs."""
    report = result.report
    if report.get("evaluations"):
        console.print(evaluation_table(report))
    if result.before and result.after:
        console.print(verdict(result.before, result.after), markup=False, highlight=False, soft_wrap=True)
        print_change(result.before, result.after, console)
    console.print(
        f"{plural(report['steps'], 'step')} in {report['seconds']:.0f} s of training, seed {report['seed']}, "
        f"start weights {report['start_weights'][:16]}; everything is in {result.run_dir}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    notes = [f"hint: {hint}" for hint in hints]
    if report.get("stopped"):
        notes.insert(0, f"training ended after step {report['stopped']['step']}: {report['stopped']['reason']}")
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True, markup=False)
    if report.get("account"):
        totals = ", ".join(f"{name} {total:,.6g}" for name, total in report["account"].items())
        console.print(f"{report['reward']}: {totals}", highlight=False, soft_wrap=True, markup=False)


def advice(result: TrainResult, hints: Sequence[str]) -> list[Advice]:
    """Return what to do next, most important first."""
    with Store(store_file(result.run_dir)) as store:
        command = store.meta("command") or {"given": {}}
    it = paired_change(result.before, result.after) if result.before and result.after else None
    return next_steps(
        result.run_dir,
        ended="rule" if result.report.get("stopped") else None,
        verdicts=[it.verdict] if it else [],
        solved=it is not None and {*results(result.before), *results(result.after)} == {1.0},
        suspicious=bool(hints),
        steps=result.report["steps"],
        given=command["given"],
    )


def failures(trajectories: Sequence[Trajectory]) -> tuple[int, str | None]:
    """Return how many rollouts failed, and the most frequent error with the line that raised it."""
    errors = [f"{t.error}{f' ({t.error_at})' if t.error_at else ''}" for t in trajectories if t.error]
    return len(errors), max(errors, key=errors.count, default=None)


def evaluation_table(report: Mapping[str, Any]) -> Table:
    """Return a table of the evaluations, with 95 % intervals of success, or of the mean reward if successes are not counted."""
    unscored = any(evaluation.get("unscored") for evaluation in report["evaluations"])
    columns = ["evaluation", "temperature", "success", "95 % interval", "tasks", "mean reward"]
    table = Table(*columns, *["unscored runs"] * unscored)
    for evaluation in report["evaluations"]:
        low, high = evaluation["interval"]
        counted, temperature, reward = (evaluation[key] for key in ("counts_successes", "temperature", "mean_reward"))
        table.add_row(
            evaluation["name"],
            "the agent's own" if temperature is None else f"{temperature:g}",
            f"{evaluation['success']:.1%}" if counted else "-",
            f"{low:.1%} to {high:.1%}" if counted else f"{low:.3g} to {high:.3g}",
            str(evaluation["n"]),
            "none" if reward is None else f"{reward:.3f}",
            *[str(evaluation.get("unscored", 0))] * unscored,
        )
    return table


def verdict(before: Report, after: Report) -> str:
    """Return whether the tasks are solved better than before, from the differences on the same tasks with a 95 % interval."""
    it = paired_change(before, after)
    if it is None:
        return "can't tell whether it is better: no task was scored both before and after"
    said = "can't tell whether it is better" if it.verdict == "can't tell" else it.verdict
    points = before.counts_successes and after.counts_successes
    scale, unit = (100, "points of success") if points else (1, "of mean reward")
    value, low, high = (scale * number for number in (it.value, it.low, it.high))
    unscored = len(before.trajectories) - it.tasks
    left_out = f"; {unscored} without a score before or after left out" if unscored else ""
    tasks = plural(it.tasks, "task")
    interval = f"95 %: {low:+.3g} to {high:+.3g}" if it.high < math.inf else f"an interval needs {FEW} tasks"
    return f"{said}: {value:+.3g} {unit} ({interval}) on the same {tasks}{left_out}"


def print_change(before: Report, after: Report, console: Console) -> None:
    """Print one task before and after, preferably one that failed before and succeeded after."""
    pairs = enumerate(zip(results(before), results(after), strict=True))  # same tasks, same order
    index = next((i for i, (was, now) in pairs if was is not None and now is not None and was < now), 0)
    print_trajectory(before.trajectories[index], "before", console)
    print_trajectory(after.trajectories[index], "after, the same task", console)


def print_trajectory(trajectory: Trajectory, title: str, console: Console) -> None:
    """Print a rollout's conversation, error, reward, and the reward's notes."""
    lines = [f"[bold]{_plain(message['role'])}[/bold] {_plain(text)}" for message, text in shown(trajectory)]
    if trajectory.error:
        lines.append(f"[red]the agent failed: {_plain(trajectory.error)}[/red]")
    lines += [f"[dim]{_plain(name)}: {_plain(text)}[/dim]" for name, text in trajectory.notes.items()]
    metrics = "  ".join(f"{_plain(name)} {value:g}" for name, value in trajectory.metrics.items())
    reward = "not scored" if trajectory.reward is None else f"reward {trajectory.reward:.2f}"
    console.print(Panel("\n".join(lines), title=title, subtitle=f"{reward}  {metrics}"))


def _plain(text: str) -> str:
    """Escape text from an agent or a judge, so that neither rich nor the terminal interprets it."""
    return escape(printable(text))


def shown(trajectory: Trajectory) -> list[tuple[JsonDict, str]]:
    """Return each message with its text: content, then tool calls as ``name(arguments)``."""
    return [(message, text_of(message, SHORTENED)) for message in trajectory.messages()]


def text_of(message: Mapping[str, Any], most: int | None = None) -> str:
    """Return a message's content, cut after ``most`` characters, then its tool calls as ``name(arguments)``."""
    content = message.get("content") or ""
    text = content if isinstance(content, str) else json.dumps(content)
    if most is not None and len(text) > most:
        text = f"{text[:most]} ... ({len(text)} characters)"
    for call in message.get("tool_calls") or ():
        text += f" {call['function']['name']}({call['function']['arguments']})"
    return text.strip()
