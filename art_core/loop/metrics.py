"""The metrics of a step: from its groups, its seconds and the engine's counters."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from art_core.errors import CaptureError
from art_core.types import Group, TokenTree, Trajectory

STEP_METRICS = frozenset(
    {
        "step", "reward", "call_reward", "trajectories", "failed", "unscored", "calls", "sampled_tokens", "groups_sampled",
        "groups_unscored", "groups_with_contrast", "groups_stale", "prompt_tokens", "same_answer", "staleness", "staleness_max",
        "seconds", "temperature", "rollout_seconds", "score_seconds", "wait_seconds", "learn_seconds", "memory_bytes",
    }
)  # fmt: skip
"""If a reward's metric has one of these names, it becomes ``reward/...``; a learner's becomes ``learner/...``."""
UPDATE_METRICS = frozenset({"dropped", "skipped", "mismatch", "cannot_tell", "entropy", "kl_ref", "logprob_gap"})
"""They decide whether and how training continues, so a reward's metrics of these names become ``reward/...``."""
Z = 1.959963984540054
"""The 97.5 % point of the normal distribution, for intervals of 95 %."""


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return counts over all recorded calls, trained or not, and means over all trajectories of the reward and of the metrics
    that reward functions set. The rewards of single calls are averaged over all calls (``call_reward``) and by node.

    Every name belongs in ``STEP_METRICS``, so that no reward's metric hides it.
    """
    trajectories = [t for g in groups for t in g.trajectories]
    temperatures = [call.temperature for t in trajectories for call in t.calls]
    answers = Counter(tuple(call.sampled_ids for call in t.calls) for t in trajectories if t.calls)
    values: defaultdict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values[f"reward/{name}" if name in STEP_METRICS | UPDATE_METRICS else name].append(float(value))
        if trajectory.reward is not None:
            values["reward"].append(trajectory.reward)
        for call in trajectory.calls:
            if call.reward is not None:
                values["call_reward"].append(call.reward)
                if call.agent:
                    values[f"call_reward/{call.agent}"].append(call.reward)
    if "success" in values:  # as in an evaluation: 0 if missing
        values["success"] += [0.0] * (len(values.get("reward", ())) - len(values["success"]))
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()} | {
        "groups_sampled": float(len(groups)),
        "groups_unscored": float(sum(all(t.reward is None for t in g.trajectories) for g in groups)),
        "trajectories": float(len(trajectories)),
        "failed": float(sum(t.error is not None for t in trajectories)),
        "unscored": float(sum(t.reward is None for t in trajectories)),
        "calls": float(sum(len(t.calls) for t in trajectories)),
        "temperature": sum(temperatures) / max(1, len(temperatures)),
        "same_answer": max(answers.values(), default=0) / max(1, len(trajectories)),
        "prompt_tokens": float(sum(len(c.prompt_ids) for t in trajectories for c in t.calls)),
        "sampled_tokens": float(sum(len(c.sampled_ids) for t in trajectories for c in t.calls)),
    }


def untrained_shares(trees: Sequence[TokenTree], trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the shares of the targets that are not trained (``untrained``) and that a grammar forced (``forced``).

    The former has the latter in it, and the tokens of calls that were cut off or aborted.
    """
    targets = max(1, sum(tree.num_targets for tree in trees))
    untrained = sum(int(np.count_nonzero(tree.weights == 0)) for tree in trees)
    forced = sum(len(call.forced) for trajectory in trajectories for call in trajectory.calls)
    return {"untrained": untrained / targets, "forced": forced / targets}


def merge_metrics(metrics: Mapping[str, float], more: Mapping[str, float], whose: str = "learner") -> dict[str, float]:
    """Return a step's metrics with ``more``, named ``WHOSE/...`` if the step or a reward already uses the name.

    A reward's metrics keep theirs: steps without a learner have them too, and a name should mean the same in all steps.
    """
    taken = STEP_METRICS | metrics.keys()
    return {**metrics, **{f"{whose}/{name}" if name in taken else name: value for name, value in more.items()}}


def of_learner(metrics: Mapping[str, float], name: str) -> float:
    """Return the learner's metric from a step's, whichever name ``merge_metrics`` gave it; 0 if it is missing."""
    return metrics.get(f"learner/{name}", metrics.get(name, 0.0))


def staleness(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return the mean and maximum, over all calls, of the optimizer steps between the weights that sampled and ``version``."""
    ages = [version - call.policy_version for g in groups for t in g.trajectories for call in t.calls]
    return {"staleness": sum(ages) / max(1, len(ages)), "staleness_max": float(max(ages, default=0))}


class Timer:
    """Seconds by name, since they were last taken."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count the block's seconds under ``name``; inside ``timed_separately()`` they are counted there."""
        separate, started = _apart.get(), time.monotonic()
        try:
            yield
        finally:
            # Looked up after the block, because taken() may have replaced it.
            spent = self._spent if separate is None else separate
            spent[name] = spent.get(name, 0.0) + time.monotonic() - started

    def taken(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        spent, self._spent = self._spent, {}
        return spent

    def taken_by_step(self, groups: Mapping[str, float]) -> dict[str, float]:
        """Return ``groups`` and ``taken()`` with their sum. If the groups were made beside another step, only the wait counts."""
        spent = {**groups, **self.taken()}
        waited = spent.get("wait_seconds")
        return {**spent, "seconds": sum(spent.values()) if waited is None else waited + spent["learn_seconds"]}


@contextmanager
def timed_separately() -> Iterator[dict[str, float]]:
    """Time this block separately from the current step, in the dict that it yields."""
    spent: dict[str, float] = {}
    token = _apart.set(spent)
    try:
        yield spent
    finally:
        _apart.reset(token)


_apart: ContextVar[dict[str, float] | None] = ContextVar("art_timed_apart", default=None)


class Throughput:
    """The engine's rates since the last call. ``counters`` returns the totals of ``EngineBase.counters``."""

    def __init__(self, counters: Callable[[], Awaitable[Mapping[str, float]]]) -> None:
        self._counters = counters
        self._totals: Mapping[str, float] = {}
        self._at = time.monotonic()

    async def taken(self) -> dict[str, float]:
        """Return ``tokens_per_second`` (sampled) and, if there were prompts, ``cache_hit_rate``: the share of their tokens
        that was cached. Empty if the engine doesn't count or can't be reached."""
        try:
            totals = await self._counters()
        except CaptureError:  # raised by the next command that the run depends on
            return {}
        before, since, self._totals, self._at = self._totals, self._at, totals, time.monotonic()
        if not totals:
            return {}
        # A restarted server counts from 0 again.
        new = {name: max(0.0, total - before.get(name, 0.0)) for name, total in totals.items()}
        rates = {"tokens_per_second": new["sampled_tokens"] / max(self._at - since, 1e-9)}
        return rates | ({"cache_hit_rate": new["cached_tokens"] / new["prompt_tokens"]} if new["prompt_tokens"] else {})


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share observed among ``n``, within [0, 1].

    With z = 1.96: (p + z^2/2n +- z sqrt(p(1 - p)/n + z^2/4n^2)) / (1 + z^2/n) (E. B. Wilson, "Probable inference, the law
    of succession, and statistical inference", Journal of the American Statistical Association 22, 1927).
    """
    centre = share + Z * Z / (2 * n)
    half = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    low, high = ((centre + side) / (1 + Z * Z / n) for side in (-half, half))
    # At a share of 0 or 1 one end equals it, up to rounding.
    return max(0.0, min(low, share)), min(1.0, max(high, share))
