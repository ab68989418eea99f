"""What ``art judge`` prints and asks the user."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.prompt import Prompt
from rich.table import Table
from rich.text import Text

from art_core.plugin_api import printable
from art_core.store import Store
from art_ruler.calibration import Agreement, Preference, agreement, append_preference, read_preferences
from art_ruler.ruler import Ruler
from art_ruler.stored import Opinions, group_of, preferred, shown

__all__ = ["Calibration", "Judged", "ask_preferences", "scores_table"]


@dataclass
class Judged:
    """The result of ``art judge RUN``."""

    ruler: Ruler
    opinions: Opinions
    groups: Sequence[Sequence[str]]
    rewards: Mapping[str, float | None]
    """The run's own rewards, by rollout id."""

    def as_json(self) -> dict[str, Any]:
        return {
            "by": self.ruler.signature,
            "groups": len(self.groups),
            "judged": self.opinions.judged,
            "already": self.opinions.already,
            "unscored": dict(self.opinions.unscored),
            "agreement_with_rewards": self._agreement().as_json(),
            "took": self.ruler.account(),
        }

    def print(self, console: Console) -> None:
        opinions, say = self.opinions, _printer(console)
        say(f"{self.ruler.name}: groups judged {opinions.judged}, judged before {opinions.already}")
        for reason, count in opinions.unscored.most_common():
            say(f"groups without scores {count}: {reason}")
        agrees = self._agreement()
        if agrees.accuracy is not None:
            say(f"orders {agrees.accuracy:.1%} of {agrees.strict} pairs of rollouts as the run's own rewards do")
        say(_usage(self.ruler))
        say("scores and explanations: art judge show, or the table scores in run.sqlite")

    def _agreement(self) -> Agreement:
        return agreement(preferred(self.groups, self.rewards), self.opinions.scores)


@dataclass
class Calibration:
    """One row per judge: how well it agrees with people, and what it cost."""

    preferences: Sequence[Preference]
    rewards: Mapping[str, float | None]
    """The run's own rewards, by rollout id; they get a row as well."""
    rows: list[Row] = field(default_factory=list)

    def add(self, ruler: Ruler, opinions: Opinions) -> None:
        agrees = agreement(self.preferences, opinions.scores)
        name = ruler.name.removeprefix("ruler ")
        self.rows.append(Row(name, agrees, ruler.account(), sum(opinions.unscored.values()), opinions.already))

    def _all(self) -> list[Row]:
        return [*self.rows, Row("the run's own rewards", agreement(self.preferences, self.rewards), None, 0, 0)]

    def as_json(self) -> dict[str, Any]:
        return {
            "judges": [
                {
                    "judge": row.judge,
                    **row.agrees.as_json(),
                    "groups_unscored": row.unscored,
                    "groups_kept": row.stored,
                    "took": row.usage,
                }
                for row in self._all()
            ]
        }

    def print(self, console: Console) -> None:
        table = Table(show_lines=True)
        for name in ("judge", "agrees", "95 %", "tau", "pairs", "no score", "tokens", "US $"):
            table.add_column(name, overflow="fold")
        for row in self._all():
            low, high = row.agrees.interval or (None, None)
            table.add_row(
                row.judge,
                _number(row.agrees.accuracy, ".1%"),
                f"{_number(low, '.0%')} to {_number(high, '.0%')}",
                _number(row.agrees.tau, ".2f"),
                str(row.agrees.pairs),
                str(row.agrees.unscored),
                *row.costs(),
            )
        console.print(table)
        say = _printer(console)
        say("agrees: share of pairs that the judge orders as people do (50 %: chance level); tau: -1 to 1")
        if any(row.stored for row in self.rows):
            say(
                "stored: these scores were in the run folder, so the judge was not asked; --again asks, to measure the cost"
            )


@dataclass(frozen=True)
class Row:
    """One judge in a calibration."""

    judge: str
    agrees: Agreement
    usage: dict[str, float] | None
    """Its account; None for the run's own rewards."""
    unscored: int
    """Groups without scores."""
    stored: int
    """Groups whose scores were in the run folder already."""

    def costs(self) -> tuple[str, str]:
        """Return tokens and US dollars for the table."""
        if self.usage is None:
            return "-", "-"
        if self.stored:
            return "stored", "stored"
        tokens = self.usage["judge/input_tokens"] + self.usage["judge/output_tokens"]
        return f"{tokens:.0f}", "unknown" if self.usage["judge/unpriced"] else f"{self.usage['judge/cost']:.4f}"


def scores_table(store: Store, group: Sequence[str]) -> Table:
    """Return a table of all scores of a group's rollouts, the newest last."""
    table = Table(title=Text(printable(title_of(group_of(store, group).task))), show_lines=True)
    for name in ("rollout", "by", "score", "why"):
        table.add_column(name, overflow="fold")
    for rollout_id in group:
        for score in store.scores(rollout_id):
            notes = score.notes.items()
            why = "\n".join(text if len(notes) == 1 else f"{name}: {text}" for name, text in notes)
            by = f"{score.by or ''}{' (aside)' if score.aside else ''}"
            cells = rollout_id, by, _number(score.reward, ".3f"), why
            table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def title_of(task: Any) -> str:
    """Return a task in one line: its input; if that is a conversation, the last message."""
    content = task.get("input", task) if isinstance(task, dict) else task
    messages = content.get("messages") if isinstance(content, dict) else None
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        content = messages[-1].get("content", content)
    text = " ".join(str(content).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


def ask_preferences(store: Store, pairs: Sequence[tuple[str, str]], out: Path, most: int) -> None:
    """Show pairs of rollouts and save which one is better, until ``most`` are answered or the user quits."""
    known = {preference.pair for preference in read_preferences(out)} if out.exists() else set()
    console, answered = Console(), 0
    for pair in pairs:
        if answered == most:
            break
        if frozenset(pair) in known:
            continue
        shared, own = shown(group_of(store, pair))
        if own[0] == own[1]:
            continue
        console.print(Panel(Text(printable(shared)), title="both start with"))
        for name, text in zip("ab", own, strict=True):
            console.print(Panel(Text(printable(text)), title=name))
        answer = _answer(f"{answered + 1} of {most}. Which is better? a, b, = (equal), s (skip), q (quit)")
        if answer == "q":
            break
        if answer != "s":
            better, worse = pair if answer != "b" else pair[::-1]
            append_preference(out, Preference(better, worse, tie=answer == "="))
            answered += 1
    calibrate = f"art judge calibrate RUN {shlex.quote(str(out))} --judge ..."
    _printer(console)(f"{answered} preferences written to {out}; next: {calibrate}")


def _answer(text: str) -> str:
    try:
        return Prompt.ask(text, choices=["a", "b", "=", "s", "q"], case_sensitive=False, show_choices=False)
    except (EOFError, KeyboardInterrupt):  # earlier answers are saved
        return "q"


def _usage(ruler: Ruler) -> str:
    usage = {name.removeprefix("judge/"): value for name, value in ruler.account().items()}
    cost = f"${usage['cost']:.4f}" if "cost" in usage else "cost unknown"
    unpriced = f" and {usage['unpriced']:.0f} answers of unknown cost" if "cost" in usage and usage["unpriced"] else ""
    return (
        f"requests {usage['requests']:.0f} (unanswered {usage['failed']:.0f}, unusable answers {usage['faults']:.0f}), "
        f"tokens in {usage['input_tokens']:.0f}, out {usage['output_tokens']:.0f}, {cost}{unpriced}"
    )


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _printer(console: Console) -> Any:
    return lambda text: console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
