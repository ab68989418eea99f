"""Conditions that a side must meet to replace another, and whether it does.

A condition fails if the tasks show that it isn't met: a side that is as good as the bound is refused in at most ``LEVEL`` of all
comparisons, however noisy the tasks. It holds if they show that it is met. In between nothing is shown, because there are too
few tasks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from art_compare import statistics
from art_compare.measures import MEASURES
from art_core.errors import ConfigError

if TYPE_CHECKING:
    from art_compare.comparison import Comparison

NUMBER = r"\d+(?:\.\d*)?|\.\d+"
CONDITION = re.compile(
    rf"""\s*(?P<measure>\w+)\s*(?P<order>>=|<=)\s*
    (?: (?:(?P<factor>{NUMBER})\s*\*\s*)? (?P<side>[A-Za-z_][\w.-]*?) (?:\s*(?P<sign>[+]|\s-\s)\s*(?P<margin>{NUMBER}))?
    | (?P<bound>{NUMBER}) )\s*""",
    re.VERBOSE,
)
State = Literal["holds", "fails", "not shown"]


@dataclass(frozen=True)
class Condition:
    """``measure`` of the candidate is at least (or at most) ``factor`` times that of ``side``, plus ``constant``."""

    text: str
    measure: str
    at_least: bool
    side: str | None
    """None: the bound is ``constant``."""
    factor: float = 1.0
    constant: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What the tasks say of a condition."""

    condition: str
    side: str
    """Who has to meet it."""
    state: State
    value: float
    bound: float
    tasks: int
    advice: str = ""

    def as_json(self) -> dict[str, Any]:
        return vars(self)


def read_gate(text: str, sides: Sequence[str]) -> tuple[Condition, ...]:
    """Parse conditions, separated by commas. Raises ConfigError for what isn't one, and for sides that don't exist."""
    return tuple(_condition(part, sides) for part in text.split(",") if part.strip())


def _condition(text: str, sides: Sequence[str]) -> Condition:
    found = CONDITION.fullmatch(text)
    if found is None or found["measure"] not in MEASURES:
        raise ConfigError(
            f"{text.strip()!r} is not a condition; write MEASURE >= SIDE - NUMBER, MEASURE <= FACTOR * SIDE or "
            f"MEASURE >= NUMBER, such as 'success >= {sides[0]} - 0.02'; the measures are {', '.join(MEASURES)}"
        )
    if found["side"] is not None and found["side"] not in sides:
        raise ConfigError(f"{text.strip()!r} names {found['side']!r}, but the sides are {', '.join(sides)}")
    margin = float(found["margin"] or 0) * (-1 if "-" in (found["sign"] or "") else 1)
    return Condition(
        text.strip(),
        found["measure"],
        found["order"] == ">=",
        found["side"],
        float(found["factor"] or 1) if found["side"] else 0.0,
        margin if found["side"] else float(found["bound"]),
    )


def judge(condition: Condition, comparison: Comparison, side: int) -> Verdict:
    """Return what the tasks say. Raises ConfigError if the measure isn't known."""
    reference = 0 if condition.side is None else comparison.index(condition.side)
    pairs = comparison.columns(condition.measure, reference, side)
    name = comparison.sides[side].name
    if not len(pairs):
        needs = "--price NAME=PROMPT/SAMPLED for both sides" if condition.measure == "cost" else "a reward that sets it"
        raise ConfigError(f"{condition.text!r} can't be judged: {condition.measure} isn't known; it needs {needs}")
    how = MEASURES[condition.measure]
    other, value = map(float, how.sum_up(pairs))
    bound = condition.factor * other + condition.constant
    at_worst, at_best = _bounds(condition, pairs)
    state: State = "fails" if at_best < 0 else "holds" if at_worst >= 0 else "not shown"
    advice = _advice(pairs) if state == "not shown" and how.points and condition.factor == 1 else ""
    return Verdict(condition.text, name, state, value, bound, len(pairs), advice)


def _bounds(condition: Condition, pairs: np.ndarray) -> tuple[float, float]:
    """Return between what the candidate's advantage over the bound lies, each side of it with certainty 1 - ``LEVEL``."""
    how, sign = MEASURES[condition.measure], 1.0 if condition.at_least else -1.0
    if statistics.is_binary(pairs) and how.quantile is None and condition.factor == 1:
        lost, won = statistics.discordant(pairs)
        low, high = statistics.score_interval(lost, won, len(pairs), statistics.Z_LEVEL)
        low, high = low - condition.constant, high - condition.constant
        worse = (lost, won) if sign > 0 else (won, lost)
        at_worst, at_best = (low, high) if sign > 0 else (-high, -low)
        if condition.constant == 0 and statistics.at_most(worse[1], sum(worse)) > statistics.LEVEL:
            at_best = max(at_best, 0.0)  # the exact test, whose level is never above the stated one
        return at_worst, at_best
    weights = np.array([-condition.factor, 1.0])
    drawn = statistics.resampled(pairs, lambda it: how.sum_up(it) @ weights - condition.constant)
    return statistics.percentiles(sign * drawn if sign > 0 else np.sort(-drawn), statistics.LEVEL)


def _advice(pairs: np.ndarray) -> str:
    unequal = float((pairs[:, 0] != pairs[:, 1]).mean())
    least = statistics.detectable(max(unequal, 1 / len(pairs)), len(pairs))
    return f"{len(pairs)} tasks show a difference of about {100 * least:.0f} points in 8 of 10 comparisons; more tasks show less"
