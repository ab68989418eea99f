"""Conditions that a side must meet to replace another, and whether it does.

A condition fails if the tasks show that it isn't met, so a side that is just as good as the bound is refused in about ``LEVEL``
of all comparisons or fewer, however noisy the tasks. It holds if they show that it is met. In between nothing is shown, because
there are too few tasks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from art_cli.change import score
from art_compare import statistics
from art_compare.measures import MEASURES
from art_core.errors import ConfigError

if TYPE_CHECKING:
    from art_compare.comparison import Comparison

NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
CONDITION = re.compile(rf"(\w+)\s*(>=|<=)\s*(?:({NUMBER})\s*\*\s*)?(\S.*)")
WITH_MARGIN = re.compile(rf"(.+?)\s*([+-])\s*({NUMBER})")
BY_REWARD = ("success", "reward")
"""Measures that mean something else if another reward scored."""
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
    met: bool
    """Whether the value meets the bound, as far as these tasks go."""
    tasks: int
    advice: str = ""

    def as_json(self) -> dict[str, Any]:
        return vars(self)


def read_gate(text: str, sides: Sequence[str]) -> tuple[Condition, ...]:
    """Parse conditions, separated by commas. Raises ConfigError for what isn't one, and for sides that don't exist."""
    return tuple(_condition(part.strip(), sides) for part in text.split(",") if part.strip())


def _condition(text: str, sides: Sequence[str]) -> Condition:
    found = CONDITION.fullmatch(text)
    if found and found[1] in MEASURES:
        measure, order, factor, rest = found.groups()
        side, margin = _side_and_margin(rest.strip(), sides)
        if side is not None:
            return Condition(text, measure, order == ">=", side, float(factor or 1), margin)
        if factor is None and re.fullmatch(f"-?{NUMBER}", rest):
            return Condition(text, measure, order == ">=", None, 0.0, float(rest))
    raise ConfigError(
        f"{text!r} is not a condition; write MEASURE >= SIDE - NUMBER, MEASURE <= FACTOR * SIDE or MEASURE >= NUMBER, such as "
        f"'success >= {sides[0]} - 0.02'. The sides are {', '.join(sides)}; the measures are {', '.join(MEASURES)}"
    )


def _side_and_margin(text: str, sides: Sequence[str]) -> tuple[str | None, float]:
    """Return a side and what is added to it; names may have dashes, so a whole name comes first."""
    if text in sides:
        return text, 0.0
    found = WITH_MARGIN.fullmatch(text)
    if found and found[1] in sides:
        return found[1], float(f"{found[2]}{found[3]}")
    return None, 0.0


def judge(condition: Condition, comparison: Comparison, side: int) -> Verdict:
    """Return what the tasks say. Raises ConfigError if the measure isn't known."""
    reference = 0 if condition.side is None else comparison.index(condition.side)
    pairs = comparison.columns(condition.measure, reference, side)
    name = comparison.sides[side].name
    first, second = comparison.sides[reference], comparison.sides[side]
    if condition.side and condition.measure in BY_REWARD and first.reward != second.reward:
        raise ConfigError(
            f"{condition.text!r} can't be judged: {first.name} was scored by {first.reward}, {name} by {second.reward}; "
            "evaluate both with the same --reward"
        )
    if not len(pairs):
        needs = (
            "--price NAME=PROMPT/SAMPLED for each side without a listed model"
            if condition.measure == "cost"
            else "a reward that sets it"
        )
        raise ConfigError(
            f"{condition.text!r} can't be judged: {condition.measure} isn't known of both sides; it needs {needs}"
        )
    how = MEASURES[condition.measure]
    other, value = map(float, how.sum_up(pairs))
    bound = condition.factor * other + condition.constant
    state = _state(condition, pairs)
    advice = _advice(pairs) if state == "not shown" and how.points and condition.factor == 1 else ""
    met = value >= bound if condition.at_least else value <= bound
    return Verdict(condition.text, name, state, value, bound, met, len(pairs), advice)


def _state(condition: Condition, pairs: np.ndarray) -> State:
    """Test the condition on (tasks, 2): the reference's numbers and the candidate's."""
    how = MEASURES[condition.measure]
    if how.quantile is None and condition.factor in (0, 1) and statistics.is_binary(pairs):
        below, above = _p_values(condition, pairs)
    elif len(pairs) < statistics.FEW:
        return "not shown"
    else:
        weights = np.array([-condition.factor, 1.0])
        drawn = statistics.resampled(pairs, lambda it: how.sum_up(it) @ weights - condition.constant)
        below, above = float((drawn >= 0).mean()), float((drawn <= 0).mean())
    p_worse, p_better = (below, above) if condition.at_least else (above, below)
    return "fails" if p_worse <= statistics.LEVEL else "holds" if p_better <= statistics.LEVEL else "not shown"


def _p_values(condition: Condition, pairs: np.ndarray) -> tuple[float, float]:
    """Return how probable successes as few as these, and as many, are if the rate is just at the bound."""
    tasks, solved = len(pairs), int(pairs[:, 1].sum())
    if condition.side is None:
        rate = condition.constant
        return statistics.binomial(solved, tasks, rate), statistics.binomial(tasks - solved, tasks, 1 - rate)
    lost, won = statistics.discordant(pairs)
    if condition.constant == 0:
        return statistics.at_most(won, lost + won), statistics.at_most(lost, lost + won)
    below = NormalDist().cdf(score(lost, won, tasks, condition.constant))
    return below, 1 - below


def _advice(pairs: np.ndarray) -> str:
    unequal = float((pairs[:, 0] != pairs[:, 1]).mean())
    least = statistics.detectable(max(unequal, 1 / len(pairs)), len(pairs))
    if least >= 1:
        return "far too few tasks to tell"
    points = f"a loss of {100 * least:.0f} points would be found in about 8 of 10 comparisons"
    return f"with {len(pairs)} tasks, {points}; with more, smaller ones"
