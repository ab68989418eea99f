"""Groups -> the numbers of a step, and where the seconds go. Knows nothing about how groups come about."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from art_core.types import Group, TokenTree, Trajectory

OURS = frozenset(
    {
        "step", "reward", "call_reward", "trajectories", "failed", "unscored", "calls", "sampled_tokens", "groups_sampled",
        "groups_unscored", "groups_with_contrast", "groups_stale", "staleness", "staleness_max", "seconds", "rollout_seconds",
        "score_seconds", "wait_seconds", "learn_seconds",
    }
)  # fmt: skip
"""Metrics of the whole step. A reward's own of these names are kept as ``reward/...``, a learner's as ``learner/...``."""
OF_UPDATE = frozenset({"dropped", "skipped", "mismatch", "cannot_tell"})
"""Metrics of what became of the optimizer step, which decide how a run goes on. A reward's own are kept as ``reward/...``."""

Z = 1.959963984540054
"""The 97.5 % point of the normal distribution, for intervals of 95 %."""


def summary(groups: Sequence[Group]) -> dict[str, float]:
    """Return the means over all trajectories: reward, every metric that a reward function set, calls, failures; and of the
    rewards of single calls, ``call_reward`` and by node."""
    trajectories = [t for g in groups for t in g.trajectories]
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values.setdefault(f"reward/{name}" if name in OURS | OF_UPDATE else name, []).append(float(value))
        if trajectory.reward is not None:
            values.setdefault("reward", []).append(trajectory.reward)
        for call in trajectory.calls:
            if call.reward is not None:
                values.setdefault("call_reward", []).append(call.reward)
                if call.agent:
                    values.setdefault(f"call_reward/{call.agent}", []).append(call.reward)
    means = {name: sum(them) / len(them) for name, them in values.items()}
    return means | {
        "groups_sampled": float(len(groups)),
        "groups_unscored": float(sum(all(t.reward is None for t in g.trajectories) for g in groups)),
        "trajectories": float(len(trajectories)),
        "failed": float(sum(t.error is not None for t in trajectories)),
        "unscored": float(sum(t.reward is None for t in trajectories)),
        "calls": float(sum(len(t.calls) for t in trajectories)),
        "sampled_tokens": float(sum(len(c.sampled_ids) for t in trajectories for c in t.calls)),
    }


def left_out(trees: Sequence[TokenTree], trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return which share of the targets is not trained (``untrained``), and which a grammar forced (``forced``).

    What is untrained and not forced is of calls that were cut off or aborted.
    """
    targets = max(1, sum(it.num_targets for it in trees))
    untrained = sum(int(np.count_nonzero(it.weights == 0)) for it in trees)
    forced = sum(len(call.forced) for trajectory in trajectories for call in trajectory.calls)
    return {"untrained": untrained / targets, "forced": forced / targets}


def joined(metrics: Mapping[str, float], more: Mapping[str, float], whose: str = "learner") -> dict[str, float]:
    """Return a step's metrics with ``more``, which are ``WHOSE/...`` where the step or a reward has that name already.

    The reward's keep theirs: they are there in steps without a learner too, and a name should mean one thing in all steps.
    """
    taken = OURS | metrics.keys()
    return {**metrics, **{f"{whose}/{name}" if name in taken else name: value for name, value in more.items()}}


def of_learner(metrics: Mapping[str, float], name: str) -> float:
    """Return the learner's ``name`` of a step, whichever name ``joined`` gave it; 0 where there is none."""
    return metrics.get(f"learner/{name}", metrics.get(name, 0.0))


def oldest(group: Group, version: int) -> int:
    """Return how many optimizer steps older than ``version`` the weights are that sampled the group's oldest call."""
    return max(_ages([group], version), default=0)


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return mean and maximum over the groups' calls of the optimizer steps from the weights that sampled to ``version``."""
    ages = _ages(groups, version)
    return {"staleness": sum(ages) / max(1, len(ages)), "staleness_max": float(max(ages, default=0))}


def _ages(groups: Sequence[Group], version: int) -> list[int]:
    return [version - call.policy_version for g in groups for t in g.trajectories for call in t.calls]


def seconds_of_step(spent: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds by arrow with their sum; of groups that were made aside, only waiting for them is in the sum."""
    waited = spent.get("wait_seconds")
    total = sum(spent.values()) if waited is None else waited + spent["learn_seconds"]
    return {**spent, "seconds": total}


class Timer:
    """Seconds by arrow, added up until somebody takes them."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the block's seconds under ``name``; inside ``apart()`` they are counted there."""
        aside, started = _apart.get(), time.monotonic()
        try:
            yield
        finally:
            # Looked up now: what was counted before may have been taken while the block ran.
            spent = self._spent if aside is None else aside
            spent[name] = spent.get(name, 0.0) + time.monotonic() - started

    def taken(self) -> dict[str, float]:
        """Return what was counted since this was last called."""
        spent, self._spent = self._spent, {}
        return spent


@contextmanager
def apart() -> Iterator[dict[str, float]]:
    """Count the seconds of this block in the dict that is given, not in the step under way: it may be another's."""
    spent: dict[str, float] = {}
    token = _apart.set(spent)
    try:
        yield spent
    finally:
        _apart.reset(token)


_apart: ContextVar[dict[str, float] | None] = ContextVar("art_timed_apart", default=None)


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share that was seen among ``n``, within [0, 1].

    With z = 1.96: (p + z^2/2n +- z sqrt(p(1 - p)/n + z^2/4n^2)) / (1 + z^2/n) (E. B. Wilson, "Probable inference, the law
    of succession, and statistical inference", Journal of the American Statistical Association 22, 1927).
    """
    centre = share + Z * Z / (2 * n)
    half = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    low, high = ((centre + side) / (1 + Z * Z / n) for side in (-half, half))
    # At a share of 0 or 1 an end is exactly there, but for the rounding.
    return max(0.0, min(low, share)), min(1.0, max(high, share))
