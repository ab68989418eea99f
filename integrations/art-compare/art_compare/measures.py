"""What is measured of a rollout, and how a side's tasks are summed up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from art_compare.prices import UNKNOWN, Price, listed_cost
from art_core import Report
from art_core.types import Trajectory


@dataclass(frozen=True)
class Measure:
    """A number per rollout, and the side's mean or quantile of it."""

    of: str
    """The number: a name of ``numbers``."""
    show: Callable[[float], str]
    quantile: float | None = None
    points: bool = False
    """Whether differences are shown in points of a hundred."""

    def sum_up(self, values: np.ndarray) -> np.ndarray:
        """Reduce (..., tasks, sides) to (..., sides)."""
        return values.mean(axis=-2) if self.quantile is None else np.quantile(values, self.quantile, axis=-2)


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _dollars(value: float) -> str:
    return f"${value:.2g}" if abs(value) < 1 else f"${value:.2f}"


MEASURES = {
    "success": Measure("success", "{:.1%}".format, points=True),
    "reward": Measure("reward", "{:.3f}".format),
    "failed": Measure("failed", "{:.1%}".format, points=True),
    "cost": Measure("cost", _dollars),
    "seconds": Measure("seconds", _number),
    "seconds_p50": Measure("seconds", _number, quantile=0.5),
    "seconds_p95": Measure("seconds", _number, quantile=0.95),
    "calls": Measure("calls", _number),
    "prompt_tokens": Measure("prompt_tokens", _number),
    "sampled_tokens": Measure("sampled_tokens", _number),
}
"""By the names that a gate uses; all are per task."""


def numbers(report: Report, price: Price | None) -> dict[str, list[float]]:
    """Return of each rollout what ``MEASURES`` sums up; NaN for what isn't known of it."""
    trajectories = report.trajectories
    tokens = [_tokens(trajectory) for trajectory in trajectories]
    # A rollout that could not be scored says nothing, unless the agent failed.
    unscored = [not report.counts_successes or (it.reward is None and it.error is None) for it in trajectories]
    return {
        "success": [UNKNOWN if no else value for no, value in zip(unscored, report.successes, strict=True)],
        "reward": [UNKNOWN if it.reward is None else it.reward for it in trajectories],
        "failed": [float(it.error is not None) for it in trajectories],
        "cost": _costs(trajectories, price),
        "seconds": [it.seconds for it in trajectories],
        "calls": [float(len(it.calls)) for it in trajectories],
        "prompt_tokens": [p for p, _ in tokens],
        "sampled_tokens": [s for _, s in tokens],
    }


def _costs(trajectories: Sequence[Trajectory], price: Price | None) -> list[float]:
    """Return the cost of each rollout in US dollars. Without a price, all are NaN unless some rollout has only calls with a
    listed price.

    Rollouts that failed before their first call would otherwise be the only ones of known cost, which is 0.
    """
    if price is not None:
        tokens = map(_tokens, trajectories)
        return [(prompt * price[0] + sampled * price[1]) / 1e6 for prompt, sampled in tokens]
    costs = [sum(listed_cost(call) for call in it.calls if not call.choice) for it in trajectories]
    listed = any(it.calls and not math.isnan(cost) for it, cost in zip(trajectories, costs, strict=True))
    return costs if listed else [UNKNOWN] * len(costs)


def _tokens(trajectory: Trajectory) -> tuple[float, float]:
    """Return the prompt tokens of all requests, whose choices share one prompt, and the sampled tokens of all choices."""
    prompts: dict[object, float] = {}
    sampled = 0.0
    for index, call in enumerate(trajectory.calls):
        # Of several choices recorded as text, the first has the usage of all.
        if call.prompt_ids or not call.choice:
            prompts[call.request_id or index], tokens = call.token_counts() or (UNKNOWN, UNKNOWN)
            sampled += tokens
    return sum(prompts.values()), sampled
