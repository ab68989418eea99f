"""When training ends before its last step, and what to say if the steps teach little: rules over the metrics of the steps so far.

Every rule has a setting with its bound; None switches the rule off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from art_core.attribution import TO_DO
from art_core.config import TrainConfig
from art_core.loop.capture_checks import why_elsewhere
from art_core.loop.display import Display
from art_core.loop.metrics import of_learner
from art_core.loop.rollout import failure
from art_core.scoring import why_unscored
from art_core.types import Group

Metrics = Mapping[str, float]

IN_A_ROW = 3
"""Dropped or out-of-bounds steps before it is no accident."""
FLAT_STEPS = 3
"""Steps in a row without contrast after which advice is given, once."""
GIVEN_BACK = 0.5
"""Share of the best window's gain over the first window that a collapse loses."""
MATERIAL = 0.1
"""Share of the best window's mean below which a fall is no collapse, however little the rewards scatter."""
NOISE = 6.0
"""Standard errors of a difference of two windows. The best of many windows is compared, again after every step: on plateaus of
1,000 steps of independent noise 4 fired in 9 of 15 and 6 in none."""

UNSCORED = (
    "no run of the last {} steps could be scored ({}); fix what scores them, wait until it is back, or pass a larger "
    "max_unscored_steps= (None: never end for this)"
)
DROPPED = (
    "the last {} steps were dropped, because values were NaN or infinite; their files under dropped/ say which. The weights, the "
    "loss or the engine's logprobs are broken: lower learning_rate, look at those calls, or begin again from good weights"
)
FLAT = (
    "within every group of the last {} steps all rewards were equal, in {:.0f} groups, so nothing is learnt any more (their mean "
    "reward is {:.3g}, that of the steps before {:.3g}); {}, or pass a larger max_flat_groups= (None: never end for this)"
)
FELL = "if the model says the same everywhere by now, begin again with a lower learning_rate"
STOOD = "take harder tasks if all are solved, easier ones if none is"
GAP = (
    "in each of the last {} steps the learner's logprobs differed from those recorded by more than max_logprob_gap={:g} nats a "
    "token on average (now {:.3g}), so what is trained is not what was sampled; look at the engine and its number format, lower "
    "max_staleness or learning_rate, or pass a larger max_logprob_gap="
)
KL = (
    "in each of the last {} steps the divergence from the start weights was above max_kl={:g} nats a token (now {:.3g}); lower "
    "learning_rate, raise kl=, or pass a larger max_kl="
)
COLLAPSE = (
    "the mean reward of the last {} steps is {:.3g}, and it was {:.3g} in the best {} steps before: it has collapsed. Lower "
    "learning_rate, raise kl=, or look at what the runs do now; collapse_steps=None never ends for this"
)
FRESH = (
    "the engine served the new weights after every step ({} of {} changed too little to tell); it differs from the learner by "
    "{:.2g} nats over a fixed text"
)
UNTOLD = "none of {} steps changed enough to tell whether the engine served the new weights"
NOTHING_LEFT = (
    "step {} trained nothing: every call of its groups was cut off at its token limit, or aborted; pass a larger max_tokens, "
    "or overlong='train' (the loss dapo drops calls that were cut off)"
)
NOTHING_CHOSEN = (
    "step {} trained nothing: a grammar (tool_choice, response_format) left one legal token everywhere in its groups' calls, "
    "so the model chose nothing; leave it a choice: a tool with arguments, a schema with more than one answer"
)
MOSTLY_UNTRAINED = (
    "step {}: {:.0%} of the tokens that the model chose in groups with contrast are not trained, because their calls were cut "
    "off at their token limit, or aborted; pass a larger max_tokens, or overlong='train' (the loss dapo drops calls that were "
    "cut off)"
)


@dataclass(frozen=True)
class Stop:
    """Why training ends early."""

    reason: str
    may_pass: bool = False
    """Whether the same training may get further later, with nothing changed."""


def stop(steps: Sequence[Metrics], config: TrainConfig, groups: Sequence[Group] = (), *, since: int = 0) -> Stop | None:
    """Return why training should end now, and which setting to change; None to continue.

    ``steps`` are the metrics of every step so far, ``groups`` those of the last one. The first ``since`` steps were there when
    training last ended early: whoever resumes wants to see new ones. Steps of supervised learning do not count.
    """
    recent = _sampled(steps[since:])
    if config.max_unscored_steps and len(_last(recent, lambda it: not _scored(it))) >= config.max_unscored_steps:
        blind = len(_last(recent, lambda it: not _scored(it)))
        return Stop(UNSCORED.format(blind, ", ".join(why_unscored(groups))), may_pass=True)
    dropped = _last(recent, lambda it: bool(it.get("dropped")) if it["groups_with_contrast"] else None)
    if len(dropped) >= IN_A_ROW:
        return Stop(DROPPED.format(len(dropped)))
    for name, bound, said in (("logprob_gap", config.max_logprob_gap, GAP), ("kl_ref", config.max_kl, KL)):
        outside = [] if bound is None else _last(recent, _above(name, bound))
        if len(outside) >= IN_A_ROW:
            return Stop(said.format(len(outside), bound, of_learner(outside[-1], name)))
    flat = _last(recent, lambda it: False if it["groups_with_contrast"] else True if _scored(it) else None)
    if config.max_flat_groups is not None and sum(it["groups_sampled"] for it in flat) >= config.max_flat_groups:
        return Stop(_flat(flat, _sampled(steps)))
    window, rewards = config.collapse_steps, _rewards(_sampled(steps))
    if window and len(_rewards(recent)) >= window and (fall := collapse(rewards, window)):
        return Stop(COLLAPSE.format(window, fall.last, fall.best, window))
    return None


def _sampled(steps: Sequence[Metrics]) -> list[Metrics]:
    return [it for it in steps if "groups_with_contrast" in it]


def _scored(step: Metrics) -> bool:
    return bool({"reward", "call_reward"} & step.keys())


def _above(name: str, bound: float) -> Callable[[Metrics], bool | None]:
    def above(step: Metrics) -> bool | None:
        return not of_learner(step, name) <= bound if {name, f"learner/{name}"} & step.keys() else None

    return above


def _last(steps: Sequence[Metrics], counts: Callable[[Metrics], bool | None]) -> list[Metrics]:
    """Return the last steps in a row for which ``counts`` is true; those for which it is None are passed over."""
    found: list[Metrics] = []
    for step in reversed(steps):
        counted = counts(step)
        if counted is False:
            break
        found += [step] if counted else []
    return found[::-1]


def _rewards(steps: Sequence[Metrics]) -> list[float]:
    """Return the mean reward of every scored step; that of single calls if only these are rewarded."""
    scored = [it for it in steps if _scored(it)]
    of_runs = [it.get("reward", 0.0) for it in scored]
    return of_runs if any(of_runs) else [it.get("call_reward", 0.0) for it in scored]


def _flat(flat: Sequence[Metrics], steps: Sequence[Metrics]) -> str:
    rewards = _rewards(steps)
    last = fmean(rewards[-len(flat) :])
    before = fmean(rewards[: -len(flat)] or [last])
    groups = sum(it["groups_sampled"] for it in flat)
    return FLAT.format(len(flat), groups, last, before, FELL if last < before else STOOD)


@dataclass(frozen=True)
class Fall:
    """From the best window to the last."""

    best: float
    last: float


def collapse(rewards: Sequence[float], window: int) -> Fall | None:
    """Return how far the mean of the last ``window`` rewards has fallen below the best window before, if that is a collapse.

    It is one if the fall is at least half of what that best window had gained over the first one, a tenth of its mean, and
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


def flat_steps(steps: Sequence[Metrics]) -> int:
    """Return how many of the last steps in a row had no contrast."""
    return len(_last(_sampled(steps), lambda it: not it["groups_with_contrast"]))


def taught(steps: Sequence[Metrics]) -> bool:
    """Whether any step has changed the weights."""
    return any(it["groups_with_contrast"] and not it.get("skipped") and not it.get("dropped") for it in _sampled(steps))


def freshness(steps: Sequence[Metrics]) -> str | None:
    """Return whether the engine served what was learnt; None if nobody has looked."""
    looked = [it for it in steps if "mismatch" in it]
    untold = sum(int(it["cannot_tell"]) for it in looked)
    if not looked or untold == len(looked):
        return UNTOLD.format(untold) if looked else None
    return FRESH.format(untold, len(looked), looked[-1]["mismatch"])


def say_untrained(step: int, metrics: Metrics, screen: Display) -> None:
    """Say, once, that a step trained little or nothing of what the model chose. Forced tokens are no choice."""
    untrained, forced = of_learner(metrics, "untrained"), of_learner(metrics, "forced")
    if metrics.get("skipped"):
        screen.say_once((NOTHING_CHOSEN if forced == 1 else NOTHING_LEFT).format(step), about="skipped")
    elif forced < 1 and (share := (untrained - forced) / (1 - forced)) > 0.5:
        screen.say_once(MOSTLY_UNTRAINED.format(step, share), about="untrained")


def say_elsewhere(when: str, groups: Sequence[Group], screen: Display) -> None:
    """Say how many model calls did not reach the policy: each time if they were refused, once if they were meant to pass."""
    if refused := why_elsewhere(groups, "refused"):
        screen.say(f"{when}: {refused}")
        screen.say_once(f"to capture such calls, {TO_DO}")
    if passed := why_elsewhere(groups, "passed"):
        screen.say_once(f"{when}: {passed}", about="passed")


def why_failed(groups: Sequence[Group]) -> list[str]:
    """Return the most frequent reason why rollouts failed; empty if none did."""
    reasons = Counter(failure(t) for g in groups for t in g.trajectories if t.error)
    return [reason for reason, _ in reasons.most_common(1)]


def flat_advice(steps: int, groups: Sequence[Group]) -> str:
    """Return what to do about rewards that are all equal within their groups, or missing."""
    row = "this step" if steps == 1 else f"{steps} steps in a row"
    rewards = sorted({t.reward for g in groups for t in g.trajectories if t.reward is not None})
    if not rewards:
        return (
            f"{row} taught nothing: in the last no run could be scored ({', '.join(why_unscored(groups))}). "
            "Fix what scores them"
        )
    seen = f"rewards seen: {', '.join(f'{r:g}' for r in rewards[:5])}"
    return (
        f"{row} taught nothing: within every group all rewards were equal ({seen}). "
        "If all are low, take easier tasks, reward partial progress, or start from a model that sometimes succeeds; "
        "if all are high, take harder tasks; a larger group_size or a higher temperature gives more contrast"
    )
