"""What ``art judge`` prints and asks. Knows nothing about how a judge is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.prompt import Prompt
from rich.table import Table
from rich.text import Text

from art_core.redaction import printable
from art_core.store import Store
from art_ruler.calibration import Agreement, Preference, agreement, append_preference, read_preferences
from art_ruler.ruler import Ruler
from art_ruler.stored import Opinions, group_of, preferred, shown

__all__ = ["Calibration", "Judged", "ask_preferences", "scores_table"]


@dataclass
class Judged:
    """What came of ``art judge RUN``."""

    ruler: Ruler
    opinions: Opinions
    groups: Sequence[Sequence[str]]
    rewards: Mapping[str, float | None]
    """The run's own, by rollout id."""

    def as_json(self) -> dict[str, Any]:
        return {
            "by": self.ruler.name,
            "groups": len(self.groups),
            "judged": self.opinions.judged,
            "already": self.opinions.already,
            "unscored": dict(self.opinions.unscored),
            "agreement_with_rewards": self._agreement().as_json(),
            "took": self.ruler.account(),
        }

    def print(self, console: Console) -> None:
        found = self.opinions
        say = _sayer(console)
        say(f"{self.ruler.name}: groups judged {found.judged}, judged before {found.already}")
        for reason, count in found.unscored.most_common():
            say(f"groups without scores {count}: {reason}")
        agrees = self._agreement()
        if agrees.accuracy is not None:
            say(f"it orders {agrees.accuracy:.1%} of {agrees.strict} pairs of runs as the run's own rewards do")
        say(_took(self.ruler))
        say("scores and explanations: art judge show; beside the old ones in run.sqlite, table scores")

    def _agreement(self) -> Agreement:
        return agreement(preferred(self.groups, self.rewards), self.opinions.scores)


@dataclass
class Calibration:
    """A row for each judge: how well it agrees with people, and what it took."""

    preferences: Sequence[Preference]
    rewards: Mapping[str, float | None]
    """The run's own, by rollout id: a judge of their own kind."""
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
                    "judge": it.judge,
                    **it.agrees.as_json(),
                    "groups_unscored": it.unscored,
                    "groups_kept": it.kept,
                    "took": it.took,
                }
                for it in self._all()
            ]
        }

    def print(self, console: Console) -> None:
        table = Table(show_lines=True)
        for name in ("judge", "agrees", "95 %", "tau", "pairs", "no score", "tokens", "US $"):
            table.add_column(name, overflow="fold")
        for it in self._all():
            low, high = it.agrees.interval or (None, None)
            table.add_row(
                it.judge,
                _number(it.agrees.accuracy, ".1%"),
                f"{_number(low, '.0%')} to {_number(high, '.0%')}",
                _number(it.agrees.tau, ".2f"),
                str(it.agrees.pairs),
                str(it.agrees.unscored),
                *it.costs(),
            )
        console.print(table)
        say = _sayer(console)
        say("agrees: pairs in which people prefer one run and the judge too (50 %: it knows nothing); tau: -1 to 1")
        if any(it.kept for it in self.rows):
            say(
                "kept: scores that were there already, so that nobody was asked; --again asks, and shows what that costs"
            )


@dataclass(frozen=True)
class Row:
    """What is known of one judge."""

    judge: str
    agrees: Agreement
    took: dict[str, float] | None
    """Its account; None where nobody was asked."""
    unscored: int
    """Groups without scores."""
    kept: int
    """Groups whose scores were there already."""

    def costs(self) -> tuple[str, str]:
        """Return tokens and US dollars for the table."""
        if self.took is None:
            return "-", "-"
        if self.kept:
            return "kept", "kept"
        tokens = self.took["judge/input_tokens"] + self.took["judge/output_tokens"]
        return f"{tokens:.0f}", "unknown" if self.took["judge/unpriced"] else f"{self.took['judge/cost']:.4f}"


def scores_table(store: Store, group: Sequence[str]) -> Table:
    """Return every score of a group's runs, the newest last."""
    table = Table(title=Text(printable(title_of(group_of(store, group).task))), show_lines=True)
    for name in ("rollout", "by", "score", "why"):
        table.add_column(name, overflow="fold")
    for rollout_id in group:
        for it in store.scores(rollout_id):
            notes = it.notes.items()
            said = "\n".join(text if len(notes) == 1 else f"{name}: {text}" for name, text in notes)
            by = f"{it.by or ''}{' (aside)' if it.aside else ''}"
            table.add_row(*(Text(printable(it)) for it in (rollout_id, by, _number(it.reward, ".3f"), said)))
    return table


def title_of(task: Any) -> str:
    """Return a task in a line: what the agent is given, where it is a conversation its last message."""
    given = task.get("input", task) if isinstance(task, dict) else task
    messages = given.get("messages") if isinstance(given, dict) else None
    if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
        given = messages[-1].get("content", given)
    text = " ".join(str(given).split())
    return text if len(text) <= 100 else f"{text[:100]}..."


def ask_preferences(store: Store, pairs: Sequence[tuple[str, str]], out: Path, most: int) -> None:
    """Show pairs and write which run is better, until ``most`` are answered or nobody wants to go on."""
    known = {it.pair for it in read_preferences(out)} if out.exists() else set()
    console, answered = Console(), 0
    for pair in pairs:
        if answered == most:
            break
        if frozenset(pair) in known:
            continue
        shared, own = shown(group_of(store, pair))
        if own[0] == own[1]:
            continue
        console.print(Panel(Text(printable(shared)), title="both begin with"))
        for name, text in zip("ab", own, strict=True):
            console.print(Panel(Text(printable(text)), title=name))
        answer = _answer(f"{answered + 1} of {most}. Which is better? a, b, = (equal), s (skip), q (quit)")
        if answer == "q":
            break
        if answer != "s":
            better, worse = pair if answer != "b" else pair[::-1]
            append_preference(out, Preference(better, worse, tie=answer == "="))
            answered += 1
    _sayer(console)(f"{answered} preferences written to {out}; now: art judge calibrate RUN {out} --judge ...")


def _answer(text: str) -> str:
    try:
        return Prompt.ask(text, choices=["a", "b", "=", "s", "q"], case_sensitive=False, show_choices=False)
    except (EOFError, KeyboardInterrupt):  # what was answered is written
        return "q"


def _took(ruler: Ruler) -> str:
    took = {name.removeprefix("judge/"): value for name, value in ruler.account().items()}
    cost = f"${took['cost']:.4f}" if "cost" in took else "cost unknown"
    more = f" and {took['unpriced']:.0f} answers of unknown cost" if "cost" in took and took["unpriced"] else ""
    return (
        f"requests {took['requests']:.0f} (without an answer {took['failed']:.0f}, answers of no use {took['faults']:.0f}), "
        f"tokens in {took['input_tokens']:.0f}, out {took['output_tokens']:.0f}, {cost}{more}"
    )


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _sayer(console: Console) -> Any:
    return lambda text: console.print(printable(text), markup=False, highlight=False, soft_wrap=True)
