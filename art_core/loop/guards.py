"""Whether training should end before its last step: rules over the steps' metrics, and what each says.

Knows nothing about rollouts, learners or how a run ends. Every rule has a setting that says when, and switches it off.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

from art_core.config import TrainConfig
from art_core.loop.metrics import of_learner

IN_A_ROW = 3
"""Steps that are dropped, or out of bounds, before that is no accident."""
GIVEN_BACK = 0.5
"""Of what the best window had gained over the first."""
MATERIAL = 0.1
"""Of the best window's mean: less is no collapse, however little the rewards scatter."""
NOISE = 6.0
"""Times the error of a difference of two windows. The best of many windows is compared, again after every step: on plateaus of
1,000 steps of independent noise 4 fired in 9 of 15 and 6 in none."""

DROPPED = (
    "the last {} steps were dropped, because values were NaN or infinite; their files under dropped/ say which. The weights, the "
    "loss or the engine's logprobs are broken: lower learning_rate, look at those calls, or begin again from good weights"
)
FLAT = (
    "within every group of the last {steps} steps all rewards were equal, in {groups:.0f} groups, so nothing is learnt any "
    "more (their mean reward is {last:.3g}, that of the steps before {before:.3g}); {advice}, or give a larger max_flat_groups= "
    "(None: never end for this)"
)
FELL = "where the model says the same everywhere by now, begin again with a lower learning_rate"
STOOD = "take harder tasks where all are solved, easier ones where none is"
GAP = (
    "in each of the last {} steps the learner's logprobs differed from those recorded by more than max_logprob_gap={:g} nats a "
    "token on average (now {:.3g}), so what is trained is not what was sampled; look at the engine and its number format, lower "
    "max_staleness or learning_rate, or give a larger max_logprob_gap="
)
KL = (
    "in each of the last {} steps the divergence from the start weights was above max_kl={:g} nats a token (now {:.3g}); lower "
    "learning_rate, raise kl=, or give a larger max_kl="
)
COLLAPSE = (
    "the mean reward of the last {steps} steps is {last:.3g}, and it was {best:.3g} in the best {steps} steps before: it has "
    "collapsed. Lower learning_rate, raise kl=, or look at what the runs do now; collapse_steps=None never ends for this"
)


@dataclass(frozen=True)
class Fall:
    """From the best window to the last."""

    best: float
    last: float


@dataclass
class Guards:
    """Fed with the metrics of every step, of those before an interruption too."""

    config: TrainConfig
    earned: list[tuple[float, float]] = field(default_factory=list)
    """Mean reward and mean reward of single calls, per step in which anything was scored."""
    new_from: int = 0
    """Where those begin that were seen since training last ended early: who goes on wants to see new ones."""
    flat: int = 0
    """Steps in a row with rewards in which no group had contrast."""
    flat_groups: float = 0
    """Their groups."""
    dropped: int = 0
    """Steps in a row, of those with contrast, that were dropped."""
    outside: dict[str, int] = field(default_factory=dict)
    """Per metric with a bound: steps in a row above it."""
    latest: dict[str, float] = field(default_factory=dict)

    def replay(self, history: Iterable[tuple[int, Mapping[str, float]]], ended: int | None) -> Guards:
        """Take the steps of a run that goes on; ``ended`` is the step after which it ended early, if it did."""
        for step, metrics in history:
            self.add(metrics)
            if step == ended:
                self.flat, self.flat_groups, self.dropped, self.outside, self.new_from = 0, 0, 0, {}, len(self.earned)
        return self

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take a step's metrics; one of supervised learning says nothing here."""
        contrast = metrics.get("groups_with_contrast")
        if contrast is None:
            return
        if contrast:
            self.flat, self.flat_groups = 0, 0
            self.dropped = self.dropped + 1 if metrics.get("dropped") else 0
        if {"reward", "call_reward"} & metrics.keys():  # else nothing was scored, and equal rewards are not known
            if not contrast:
                self.flat, self.flat_groups = self.flat + 1, self.flat_groups + metrics["groups_sampled"]
            self.earned.append((metrics.get("reward", 0.0), metrics.get("call_reward", 0.0)))
        for name, bound in (("logprob_gap", self.config.max_logprob_gap), ("kl_ref", self.config.max_kl)):
            if bound is not None and {name, f"learner/{name}"} & metrics.keys():
                self.latest[name] = of_learner(metrics, name)
                self.outside[name] = self.outside.get(name, 0) + 1 if not self.latest[name] <= bound else 0

    def reason(self) -> str | None:
        """Say why training should end, and which setting to change; None where it should not."""
        if self.dropped >= IN_A_ROW:
            return DROPPED.format(self.dropped)
        if self.outside.get("logprob_gap", 0) >= IN_A_ROW:
            return GAP.format(self.outside["logprob_gap"], self.config.max_logprob_gap, self.latest["logprob_gap"])
        if self.outside.get("kl_ref", 0) >= IN_A_ROW:
            return KL.format(self.outside["kl_ref"], self.config.max_kl, self.latest["kl_ref"])
        if self.config.max_flat_groups is not None and self.flat_groups >= self.config.max_flat_groups:
            return self._flat()
        window = self.config.collapse_steps
        if window and len(self.earned) - self.new_from >= window and (fall := collapse(self._rewards(), window)):
            return COLLAPSE.format(steps=window, **vars(fall))
        return None

    def _rewards(self) -> list[float]:
        """Return the mean reward of every step; that of single calls where only these are rewarded."""
        of_runs, of_calls = zip(*self.earned, strict=True)
        return list(of_runs if any(of_runs) else of_calls)

    def _flat(self) -> str:
        rewards = self._rewards() if self.earned else [0.0]
        last = fmean(rewards[-self.flat :])
        before = fmean(rewards[: -self.flat] or [last])
        advice = FELL if last < before else STOOD
        return FLAT.format(steps=self.flat, groups=self.flat_groups, last=last, before=before, advice=advice)


def collapse(rewards: Sequence[float], window: int) -> Fall | None:
    """Return how far the mean of the last ``window`` rewards has fallen below the best window before, where that is a collapse.

    It is one where the fall is at least half of what that best window had gained over the first one, a tenth of its mean, and
    six times its error. The error is the larger of two: from the scatter within both windows, and from what the mean of a
    window usually changes by until the next (a median, so neither a trend nor a jump counts), which knows of slow swings.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) < 2 * window:
        return None
    means = np.convolve(values, np.full(window, 1 / window), "valid")
    earlier = means[:-window]
    at = int(earlier.argmax())
    best, last = float(earlier[at]), float(means[-1])
    scatter = values[at : at + window].var(ddof=1) + values[-window:].var(ddof=1)
    error = float(np.sqrt(scatter / window))
    changes = earlier[window:] - earlier[:-window]
    if len(changes) >= window:
        error = max(error, 1.4826 * float(np.median(np.abs(changes - np.median(changes)))))
    least = max(GIVEN_BACK * (best - float(earlier[0])), MATERIAL * abs(best), NOISE * error)
    return Fall(best, last) if best - last > least else None
