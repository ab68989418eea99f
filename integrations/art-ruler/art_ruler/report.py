"""What ``art judge`` prints and asks. Knows nothing about how a judge is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

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
        say(f"{self.ruler.name}: {found.judged} groups judged, {found.already} were judged before")
        for reason, count in found.unscored.most_common():
            say(f"{count} groups have no scores: {reason}")
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
    rows: list[tuple[str, Agreement, dict[str, float], int]] = field(default_factory=list)

    def add(self, ruler: Ruler, opinions: Opinions) -> None:
        agrees = agreement(self.preferences, opinions.scores)
        self.rows.append((ruler.name, agrees, ruler.account(), sum(opinions.unscored.values())))

    def _all(self) -> list[tuple[str, Agreement, dict[str, float], int]]:
        return [*self.rows, ("the run's own rewards", agreement(self.preferences, self.rewards), {}, 0)]

    def as_json(self) -> dict[str, Any]:
        return {
            "judges": [
                {"judge": name, **agrees.as_json(), "groups_unscored": unscored, "took": took}
                for name, agrees, took, unscored in self._all()
            ]
        }

    def print(self, console: Console) -> None:
        table = Table(
            "judge", "accuracy", "95 %", "tau", "pairs", "without a score", "requests", "tokens", "US dollars"
        )
        for name, agrees, took, _ in self._all():
            low, high = agrees.interval or (None, None)
            tokens = took.get("judge/input_tokens", 0) + took.get("judge/output_tokens", 0)
            table.add_row(
                name,
                _number(agrees.accuracy, ".1%"),
                f"{_number(low, '.1%')} to {_number(high, '.1%')}",
                _number(agrees.tau, ".2f"),
                str(agrees.pairs),
                str(agrees.unscored),
                _number(took.get("judge/requests"), ".0f"),
                _number(tokens if took else None, ".0f"),
                _number(took.get("judge/cost"), ".4f") if not took.get("judge/unpriced") else "not known",
            )
        console.print(table)
        _sayer(console)(
            "accuracy: pairs in which people prefer one run and the judge too (0.5: it knows nothing); tau: -1 to 1"
        )


def scores_table(store: Store, group: Sequence[str]) -> Table:
    """Return every score of a group's runs, the newest last."""
    table = Table("rollout", "by", "score", "why", title=Text(f"{group_of(store, group).task!r:.100}"), show_lines=True)
    for rollout_id in group:
        for it in store.scores(rollout_id):
            said = "\n".join(f"{name}: {text}" for name, text in it.notes.items())
            by = f"{it.by or ''}{' (aside)' if it.aside else ''}"
            table.add_row(*map(Text, (rollout_id, by, _number(it.reward, ".3f"), said)))
    return table


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
        console.print(Panel(Text(shared), title="both begin with"))
        for name, text in zip("ab", own, strict=True):
            console.print(Panel(Text(text), title=name))
        answer = _answer(f"{answered + 1} of {most}. Which is better? a, b, = (equal), s (skip), q (quit)")
        if answer == "q":
            break
        if answer != "s":
            better, worse = pair if answer != "b" else pair[::-1]
            append_preference(out, Preference(better, worse, tie=answer == "="))
            answered += 1
    _sayer(console)(f"{answered} preferences written to {out}; now: art judge calibrate RUN {out} --judge ...")


def _answer(text: str) -> str:
    while (answer := typer.prompt(text).strip().lower()) not in ("a", "b", "=", "s", "q"):
        typer.echo("a, b, =, s or q")
    return answer


def _took(ruler: Ruler) -> str:
    took = {name.removeprefix("judge/"): value for name, value in ruler.account().items()}
    cost = f"${took['cost']:.4f}" if not took["unpriced"] else f"${took['cost']:.4f} and what has no known price"
    return (
        f"{took['requests']:.0f} requests, {took['input_tokens']:.0f} tokens in and {took['output_tokens']:.0f} out, {cost}; "
        f"{took['faults']:.0f} answers could not be used"
    )


def _number(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _sayer(console: Console) -> Any:
    return lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
