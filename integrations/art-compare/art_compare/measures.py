"""What is measured of a rollout, and how a side's tasks are summed up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from art_core import Report
from art_core.errors import ConfigError
from art_core.types import Trajectory

Price = tuple[float, float]
"""US dollars per million prompt tokens, and per million sampled ones."""


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
    nan = float("nan")
    tokens = [_tokens(trajectory) for trajectory in trajectories]
    return {
        "success": report.successes if report.counts_successes else [nan] * len(trajectories),
        "reward": [nan if it.reward is None else it.reward for it in trajectories],
        "failed": [float(it.error is not None) for it in trajectories],
        "cost": [nan if price is None else (p * price[0] + s * price[1]) / 1e6 for p, s in tokens],
        "seconds": [it.seconds for it in trajectories],
        "calls": [float(len(it.calls)) for it in trajectories],
        "prompt_tokens": [p for p, _ in tokens],
        "sampled_tokens": [s for _, s in tokens],
    }


def _tokens(trajectory: Trajectory) -> tuple[float, float]:
    """Return the prompt tokens of all requests, whose choices share one prompt, and the sampled tokens of all choices."""
    prompts = {call.request_id or index: len(call.prompt_ids) for index, call in enumerate(trajectory.calls)}
    return float(sum(prompts.values())), float(sum(len(call.sampled_ids) for call in trajectory.calls))


def read_prices(texts: Mapping[str, str] | list[str]) -> dict[str, Price]:
    """Read ``NAME=PROMPT/SAMPLED``. Raises ConfigError."""
    prices: dict[str, Price] = {}
    for text in texts:
        name, _, price = text.partition("=")
        try:
            prompt, sampled = map(float, price.split("/"))
        except ValueError:
            raise ConfigError(
                f"--price {text}: pass NAME=PROMPT/SAMPLED, in US dollars per million tokens, such as live=0.15/0.60"
            ) from None
        prices[name] = prompt, sampled
    return prices
