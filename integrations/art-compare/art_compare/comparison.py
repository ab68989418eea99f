"""Compares sides on the tasks that all of them have: ``compare``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from art_cli.change import Z_95, score_interval
from art_compare import statistics
from art_compare.gate import Condition, Verdict, judge, read_gate
from art_compare.measures import MEASURES, numbers
from art_compare.prices import Price
from art_compare.sides import Side, as_json, read_sides, shared_tasks
from art_core import Report
from art_core.errors import ConfigError
from art_core.types import Trajectory


@dataclass(frozen=True)
class Difference:
    """How a side differs from the first in one measure."""

    value: float
    """The side's minus the first's."""
    interval: tuple[float, float]
    """95 %: the score interval of successes, else the paired bootstrap's."""
    p: float | None = None
    """McNemar's exact p-value, of successes only."""


@dataclass(frozen=True)
class Flips:
    """The tasks, by their keys, that only one of two sides solved."""

    lost: tuple[tuple[str, int], ...]
    won: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Comparison:
    """Sides measured on the same tasks. The first is what the others are compared with."""

    sides: tuple[Side, ...]
    keys: tuple[tuple[str, int], ...]
    """The tasks that all sides have."""
    values: Mapping[str, np.ndarray] = field(repr=False)
    """By the names of ``measures.numbers``, each (tasks, sides); NaN for what isn't known."""
    conditions: tuple[Condition, ...] = ()

    def index(self, name: str) -> int:
        """Return a side's place. Raises ConfigError for a name that no side has."""
        names = [side.name for side in self.sides]
        if name not in names:
            raise ConfigError(f"no side is called {name!r}; they are {', '.join(names)}")
        return names.index(name)

    def columns(self, measure: str, *sides: int) -> np.ndarray:
        """Return a measure's numbers (tasks, len(sides)) of the tasks for which all sides have one that have any.

        Empty if one of ``sides`` has none.
        """
        values = self.values[MEASURES[measure].of]
        missing = np.isnan(values)
        measured = ~missing.all(axis=0)
        if not measured[list(sides)].all():
            return np.empty((0, len(sides)))
        return values[~missing[:, measured].any(axis=1)][:, sides]

    def value(self, measure: str, side: int) -> float | None:
        """Return what a side has in a measure; None if it isn't known."""
        values = self.columns(measure, side)
        return float(MEASURES[measure].sum_up(values)[0]) if len(values) else None

    def difference(self, measure: str, side: int) -> Difference | None:
        """Return how a side differs from the first in a measure; None if it isn't known of both."""
        pairs = self.columns(measure, 0, side)
        if not len(pairs):
            return None
        how = MEASURES[measure]
        first, second = how.sum_up(pairs)
        if how.points and statistics.is_binary(pairs):
            lost, won = statistics.discordant(pairs)
            interval = score_interval(lost, won, len(pairs), Z_95)
            return Difference(float(second - first), interval, statistics.mcnemar(lost, won))
        apart = statistics.resampled(pairs, lambda drawn: how.sum_up(drawn) @ np.array([-1.0, 1.0]))
        return Difference(float(second - first), statistics.percentiles(apart, 0.025))

    def flips(self, side: int) -> Flips:
        """Return the tasks whose success differs between the first side and this one."""
        first, other = self.values["success"][:, 0], self.values["success"][:, side]
        lost = tuple(key for key, a, b in zip(self.keys, first, other, strict=True) if a > b)
        return Flips(lost, tuple(key for key, a, b in zip(self.keys, first, other, strict=True) if a < b))

    def trajectories(self, key: tuple[str, int]) -> tuple[Trajectory, ...]:
        """Return every side's rollout of a task."""
        return tuple(side.trajectories[key] for side in self.sides)

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """What the gate says of every side but the first, condition by condition."""
        return tuple(
            judge(condition, self, number)
            for number, side in enumerate(self.sides)
            if number
            for condition in self.conditions
            if condition.side != side.name
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "sides": [as_json(side) for side in self.sides],
            "tasks": len(self.keys),
            "measures": {name: known for name in MEASURES if (known := self._measure_as_json(name))},
            "flips": {
                side.name: {
                    how: [self._flip_as_json(key, number) for key in getattr(self.flips(number), how)]
                    for how in ("lost", "won")
                }
                for number, side in enumerate(self.sides)
                if number
            },
            "gate": [verdict.as_json() for verdict in self.verdicts],
        }

    def _measure_as_json(self, name: str) -> dict[str, Any] | None:
        """Return None for what no side has."""
        found: dict[str, Any] = {side.name: self.value(name, number) for number, side in enumerate(self.sides)}
        if all(value is None for value in found.values()):
            return None
        differences = {side.name: self.difference(name, number) for number, side in enumerate(self.sides) if number}
        return {"values": found, "differences": {name: it and vars(it) for name, it in differences.items()}}

    def _flip_as_json(self, key: tuple[str, int], side: int) -> dict[str, Any]:
        first, other = self.sides[0].trajectories[key], self.sides[side].trajectories[key]
        return {"task": first.task, "rollout_ids": [first.rollout_id, other.rollout_id]}


def compare(
    *sides: str,
    gate: str | None = None,
    temperature: float | str | None = None,
    prices: Mapping[str, Price] | None = None,
) -> Comparison:
    """Compare evaluations on the tasks that all of them have.

    Each side is ``[NAME=]FOLDER[@EVALUATION]``; one folder alone is compared with itself, before and after training. ``gate``:
    conditions such as ``"success >= live - 0.02, cost <= 0.5 * live"``. ``prices``: by side, for its cost. Raises ConfigError if
    a side has no evaluation, or the sides share no task or temperature.
    """
    return comparison_of(read_sides(sides, temperature), gate=gate, prices=prices)


def comparison_of(
    sides: Sequence[Side], *, gate: str | None = None, prices: Mapping[str, Price] | None = None
) -> Comparison:
    """Compare sides that were read already. Raises ConfigError as ``compare`` does."""
    keys, prices = shared_tasks(sides), prices or {}
    of_gate = conditions([side.name for side in sides], gate, prices)
    columns = [
        numbers(Report(tuple(side.trajectories[key] for key in keys), side.temperature), prices.get(side.name))
        for side in sides
    ]
    values = {name: np.array([column[name] for column in columns], dtype=float).T for name in columns[0]}
    return Comparison(tuple(sides), tuple(keys), values, of_gate)


def conditions(names: Sequence[str], gate: str | None, prices: Mapping[str, Price]) -> tuple[Condition, ...]:
    """Read the gate between sides of these names. Raises ConfigError if it can't be read, or if another side has a price."""
    if others := [name for name in prices if name not in names]:
        raise ConfigError(
            f"no side is called {others[0]!r}, for which --price was passed; the sides are {', '.join(names)}"
        )
    return tuple(read_gate(gate, names)) if gate else ()
