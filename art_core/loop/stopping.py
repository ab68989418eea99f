"""When training ends before its last step: rules over the metrics of the steps so far.

A new rule is a branch of ``stop`` with a message, and a setting in ``config.py``: None switches it off (the rule for dropped
steps has none). A bound on one number has to be passed in three steps in a row; a mean is compared over windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from art_core.config import TrainConfig
from art_core.loop.metrics import of_learner
from art_core.scoring import why_unscored
from art_core.types import Group

Metrics = Mapping[str, float]

STEPS_IN_A_ROW = 3
"""Dropped or out-of-bounds steps in a row that end training."""
LOST_GAIN = 0.5
"""A collapse loses at least this share of what the best window gained over the first."""
LOST_REWARD = 0.1
"""A collapse loses at least this share of the best window's mean, however little the rewards scatter."""
NOISE = 6.0
"""Standard errors of a difference of two windows. The best of many windows is compared, again after every step: on plateaus of
1,000 steps of independent noise 4 fired in 9 of 15 and 6 in none."""

UNSCORED = (
    "no rollout of the last {} steps could be scored ({}); fix what scores them, wait until it is back, or pass a larger "
    "max_unscored_steps= (None: never stop for this)"
)
DROPPED = (
    "the last {} steps were dropped because of NaN or infinite values; the files under dropped/ say which. The weights, the loss "
    "or the engine's logprobs are broken: lower learning_rate, look at those calls, or start again from good weights"
)
FLAT = (
    "all rewards were equal within every group of the last {} steps, in {:.0f} groups, so nothing is learned any more (mean "
    "reward {:.3g}, before that {:.3g}); {}, or pass a larger max_flat_groups= (None: never stop for this)"
)
REWARDS_FELL = "if the model now answers the same everywhere, start again with a lower learning_rate"
REWARDS_STAYED = "use harder tasks if all are solved, easier ones if none is"
GAP = (
    "in each of the last {} steps the learner's logprobs differed from the recorded ones by more than max_logprob_gap={:g} nats "
    "per token on average (now {:.3g}), so what is trained is not what was sampled; check the engine and its number format, "
    "lower max_staleness or learning_rate, or pass a larger max_logprob_gap="
)
KL = (
    "in each of the last {} steps the KL divergence from the start weights was above max_kl={:g} nats per token (now {:.3g}); "
    "lower learning_rate, raise kl=, or pass a larger max_kl="
)
COLLAPSE = (
    "the mean reward of the last {} steps is {:.3g}, down from {:.3g} in the best {} steps before: it has collapsed. Lower "
    "learning_rate, raise kl=, or look at what the rollouts do now; collapse_steps=None never stops for this"
)


@dataclass(frozen=True)
class Stop:
    """Why training ends early."""

    reason: str
    may_pass: bool = False
    """Whether the same training may get further later, with nothing changed."""


def stop(steps: Sequence[Metrics], config: TrainConfig, groups: Sequence[Group] = (), *, since: int = 0) -> Stop | None:
    """Return why training should end now, and which setting to change; None to continue.

    ``steps`` are the metrics of every step so far, ``groups`` those of the last one. The first ``since`` steps were done when
    training last ended early: only later ones make a row, but all of them are compared with. Steps of supervised learning do
    not count.
    """
    recent = sampled_steps(steps[since:])
    unscored = last_steps(recent, lambda step: not _scored(step))
    if config.max_unscored_steps and len(unscored) >= config.max_unscored_steps:
        return Stop(UNSCORED.format(len(unscored), ", ".join(why_unscored(groups))), may_pass=True)
    dropped = last_steps(recent, lambda step: bool(step.get("dropped")) if step["groups_with_contrast"] else None)
    if len(dropped) >= STEPS_IN_A_ROW:
        return Stop(DROPPED.format(len(dropped)))
    for name, bound, reason in (("logprob_gap", config.max_logprob_gap, GAP), ("kl_ref", config.max_kl, KL)):
        outside = [] if bound is None else last_steps(recent, _above(name, bound))
        if len(outside) >= STEPS_IN_A_ROW:
            return Stop(reason.format(len(outside), bound, of_learner(outside[-1], name)))
    flat = last_steps(recent, lambda step: False if step["groups_with_contrast"] else True if _scored(step) else None)
    if config.max_flat_groups is not None and sum(step["groups_sampled"] for step in flat) >= config.max_flat_groups:
        return Stop(_flat(flat, sampled_steps(steps)))
    window, rewards = config.collapse_steps, _rewards(sampled_steps(steps))
    if window and len(_rewards(recent)) >= window and (fall := collapse(rewards, window)):
        return Stop(COLLAPSE.format(window, fall.last, fall.best, window))
    return None


def sampled_steps(steps: Sequence[Metrics]) -> list[Metrics]:
    return [step for step in steps if "groups_with_contrast" in step]


def _scored(step: Metrics) -> bool:
    return bool({"reward", "call_reward"} & step.keys())


def _above(name: str, bound: float) -> Callable[[Metrics], bool | None]:
    def above(step: Metrics) -> bool | None:
        return not of_learner(step, name) <= bound if {name, f"learner/{name}"} & step.keys() else None

    return above


def last_steps(steps: Sequence[Metrics], counts: Callable[[Metrics], bool | None]) -> list[Metrics]:
    """Return the last steps in a row for which ``counts`` is true; those for which it is None are passed over."""
    last: list[Metrics] = []
    for step in reversed(steps):
        counted = counts(step)
        if counted is False:
            break
        last += [step] if counted else []
    return last[::-1]


def _rewards(steps: Sequence[Metrics]) -> list[float]:
    """Return the mean reward of every scored step; that of single calls if only calls are rewarded."""
    scored = [step for step in steps if _scored(step)]
    of_rollouts = [step.get("reward", 0.0) for step in scored]
    return of_rollouts if any(of_rollouts) else [step.get("call_reward", 0.0) for step in scored]


def _flat(flat: Sequence[Metrics], steps: Sequence[Metrics]) -> str:
    rewards = _rewards(steps)
    last = fmean(rewards[-len(flat) :])
    before = fmean(rewards[: -len(flat)] or [last])
    groups = sum(step["groups_sampled"] for step in flat)
    return FLAT.format(len(flat), groups, last, before, REWARDS_FELL if last < before else REWARDS_STAYED)


@dataclass(frozen=True)
class Fall:
    """From the best window to the last."""

    best: float
    last: float


def collapse(rewards: Sequence[float], window: int) -> Fall | None:
    """Return how far the mean of the last ``window`` rewards has fallen below the best window before, if that is a collapse.

    It is one if the fall is at least half of what the best window had gained over the first one, a tenth of its mean, and
    six times its error. The error is the larger of two: that of the scatter within both windows, and the usual change of the
    mean from one window to the next (a median, so neither a trend nor a jump counts), which covers slow swings.
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
    least = max(LOST_GAIN * (best - float(earlier[0])), LOST_REWARD * abs(best), NOISE * error)
    return Fall(best, last) if best - last > least else None
