"""Group -> rewards -> advantages."""

from __future__ import annotations

import asyncio
import inspect
import math
import reprlib
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np

from art_core.errors import ArtError, ConfigError, RewardError, TooLate, failure_of
from art_core.redaction import describe_error
from art_core.runtime.deadlines import interrupted, within
from art_core.types import Call, Group, GroupReward, Reward, Trajectory

ADVANTAGES = ("mean_std", "mean", "leave_one_out", "branch")
CONTRAST = 1e-8
"""Rewards that differ by less count as equal: sums of floats in another order differ by about 1e-16."""
NO_REASON = "the reward does not say why"


class Unscorable(RewardError):
    """A reward raised, or didn't return a number, for all rollouts of a group; ``reason`` holds for each of them."""

    def __init__(self, reason: str, where: str, cause: BaseException | None = None) -> None:
        super().__init__(f"{reason} for {where}")
        self.reason, self.__cause__ = reason, cause


async def score(group: Group, reward: Reward | GroupReward, timeout: float | None = None) -> Group:
    """Return ``group`` with every trajectory's ``reward`` set; advantages of an earlier scoring are dropped.

    ``reward`` is a function of one trajectory (a plain function is called directly; coroutines of one group run
    concurrently), or an object with ``async score(group)``, which may return None for a trajectory that it can't score.
    A failed trajectory is scored like any other: the function sees ``trajectory.error`` and decides what a failure is
    worth. Rewards of single calls, set in ``trajectory.call_rewards``, are moved to ``Call.reward``; other calls keep
    theirs. After ``timeout`` seconds the group is unscored; a plain function can only be interrupted on the main thread of
    a POSIX system. A trajectory for which the function raises is unscored; if it raises for the whole group, Unscorable is
    raised. Raises RewardError as ``values`` does.
    """
    try:
        rewards = await within(values(group, reward), timeout)
    except TooLate:
        for trajectory in group.trajectories:
            _leave_unscored(trajectory, f"{_name(reward)} did not finish within {timeout:g} seconds (score_timeout)")
        rewards = [None] * len(group.trajectories)
    scored = (
        replace(trajectory, reward=value, calls=_rewarded_calls(trajectory))
        for trajectory, value in zip(group.trajectories, rewards, strict=True)
    )
    return replace(group, trajectories=tuple(scored), advantages=(), call_advantages=())


def unscored(group: Group, error: Unscorable) -> Group:
    """Return ``group`` without rewards, with the reason from ``error``."""
    for trajectory in group.trajectories:
        _leave_unscored(trajectory, error.reason)
    trajectories = tuple(replace(trajectory, reward=None) for trajectory in group.trajectories)
    return replace(group, trajectories=trajectories, advantages=(), call_advantages=())


def _leave_unscored(trajectory: Trajectory, reason: str) -> None:
    trajectory.call_rewards.clear()
    trajectory.notes["unscored"] = reason


async def values(group: Group, reward: Reward | GroupReward) -> list[float | None]:
    """Return the reward of each trajectory, in order; what the reward adds to the trajectories is checked and stays there.

    None, with the reason in ``notes["unscored"]``, if the reward raises for a trajectory (``sys.exit()`` too) or doesn't return
    a finite number; if that happens for the whole group, Unscorable is raised. Raises RewardError for what isn't a reward, for
    rewards of calls and metrics that aren't numbers, and for notes that aren't text.
    """
    check_reward(reward)
    for trajectory in group.trajectories:
        trajectory.call_rewards.clear()
        trajectory.notes.pop("unscored", None)
    together = callable(getattr(reward, "score", None))
    rewards = await (_score_together(group, reward) if together else _score_each(group, reward))
    if rewards and all(isinstance(value, Unscorable) for value in rewards):
        raise rewards[0]
    for index, (trajectory, value) in enumerate(zip(group.trajectories, rewards, strict=True)):
        if isinstance(value, Unscorable):
            _leave_unscored(trajectory, value.reason)
            rewards[index] = None
        elif value is not None:
            trajectory.notes.pop("unscored", None)
        _check_added(reward, trajectory)
        trajectory.call_rewards.update(_call_numbers(trajectory, reward))
    return rewards


def is_reward(thing: object) -> bool:
    """Whether ``thing`` is a function or an object with ``score``; a class is neither."""
    return not isinstance(thing, type) and (callable(thing) or callable(getattr(thing, "score", None)))


def check_reward(thing: object) -> None:
    """Raise RewardError unless ``is_reward(thing)``."""
    if not is_reward(thing):
        raise RewardError(
            f"{thing!r} isn't a reward; pass a function of one trajectory, "
            "or an instance of a class with `async def score(self, group)`"
        )


def is_scored(trajectory: Trajectory) -> bool:
    """Whether the trajectory has a reward, or one of its calls has."""
    return trajectory.reward is not None or any(call.reward is not None for call in trajectory.calls)


def why_unscored(groups: Sequence[Group]) -> list[str]:
    """Return the most frequent reason why rollouts are unscored; empty if all are scored."""
    unscored = (t for group in groups for t in group.trajectories if not is_scored(t))
    reasons = Counter(t.notes.get("unscored", NO_REASON) for t in unscored)
    return [reason for reason, _ in reasons.most_common(1)]


def calls_of(trajectory: Trajectory, nodes: Sequence[str]) -> Trajectory:
    """Return ``trajectory`` with the calls of these nodes only; unchanged if ``nodes`` is empty."""
    if not nodes:
        return trajectory
    return replace(trajectory, calls=tuple(call for call in trajectory.calls if call.made_by(*nodes)))


def of_nodes(group: Group, nodes: Sequence[str]) -> Group:
    """Return ``group`` with the calls of these nodes only, each with its advantage; unchanged if ``nodes`` is empty.

    A trajectory without such a call stays, because the others' advantages are relative to it.
    """
    if not nodes:
        return group
    by_call = tuple(
        tuple(advantage for advantage, call in zip(of_calls, t.calls, strict=True) if call.made_by(*nodes))
        for of_calls, t in zip(group.call_advantages, group.trajectories, strict=bool(group.call_advantages))
    )
    return replace(group, trajectories=tuple(calls_of(t, nodes) for t in group.trajectories), call_advantages=by_call)


def has_contrast(group: Group) -> bool:
    """Whether any trajectory, or any call with a reward of its own, has a nonzero advantage.

    Otherwise there is nothing to learn from the group. Missing advantages are computed from the rewards.
    """
    group = group if group.advantages else advantages(group)
    return any(map(any, group.call_advantages or [group.advantages]))


def advantages(group: Group, how: str = "mean_std") -> Group:
    """Return ``group`` with one advantage per trajectory, relative to the group's scored trajectories.

    ``how``, for n rewards:

    - ``"mean_std"``: (reward - mean) / (std + 1e-4), std that of the sample (n - 1) (GRPO, arXiv 2402.03300)
    - ``"mean"``: reward - mean (Dr. GRPO, arXiv 2503.20783)
    - ``"leave_one_out"``: reward - mean of the other n - 1 rewards, that is (reward - mean) n / (n - 1) (RLOO, arXiv
      2402.14740): the baseline doesn't depend on the rollout itself
    - ``"branch"``: ``"mean_std"``, but each call is compared with the rollouts that made it from the same context

    Unscored trajectories get 0, and so do all if the rewards are equal. ``call_advantages`` are set for ``"branch"``, and if
    calls have rewards of their own: such a reward is compared in the same way with those of the group's rewarded calls of
    the same agent name; the other calls have that of their context or trajectory. Raises ConfigError for another ``how``.
    """
    if how not in ADVANTAGES:
        raise ConfigError(f"advantage must be one of {', '.join(ADVANTAGES)}, got {how!r}")
    relative = _relative([t.reward for t in group.trajectories], how)
    by_agent = {agent: iter(_relative(rewards, how)) for agent, rewards in _call_rewards(group).items()}
    alike = [[it] * len(t.calls) for it, t in zip(relative, group.trajectories, strict=True)]
    compared = _by_context(group, relative) if how == "branch" else alike
    by_call = tuple(
        tuple(it if call.reward is None else next(by_agent[call.agent]) for it, call in zip(row, t.calls, strict=True))
        for row, t in zip(compared, group.trajectories, strict=True)
    )
    return replace(group, advantages=relative, call_advantages=by_call if by_agent or how == "branch" else ())


def _by_context(group: Group, relative: Sequence[float]) -> list[list[float]]:
    """Return the advantage of each trajectory's calls over what its group's others got from the same contexts.

    ``relative`` are the trajectories' own advantages. A call's context is the prompt and the agent name. The expected value v
    at a context that m other trajectories reach is (their sum + the v before) / (m + 1), from the first v on, the others' mean.
    So a context that nobody shares keeps the v of the one before, and v never depends on what the trajectory did afterwards.
    The advantage is (relative - v) (n - 1) / n, for n scored trajectories: that is ``relative`` while all share the context.
    """
    scored = [place for place, t in enumerate(group.trajectories) if t.reward is not None]
    reached: dict[tuple[str | None, tuple[int, ...]], set[int]] = {}
    for place in scored:
        for call in group.trajectories[place].calls:
            reached.setdefault((call.agent, call.prompt_ids), set()).add(place)
    found = [[0.0] * len(t.calls) for t in group.trajectories]
    for place in scored if any(relative) else ():
        expected = -relative[place] / (len(scored) - 1)  # because all add up to 0
        for index, call in enumerate(group.trajectories[place].calls):
            others = reached[call.agent, call.prompt_ids] - {place}
            expected = (sum(relative[other] for other in others) + expected) / (len(others) + 1)
            found[place][index] = (relative[place] - expected) * (len(scored) - 1) / len(scored)
    return found


def _relative(rewards: Sequence[float | None], how: str) -> tuple[float, ...]:
    """Return the advantage of each reward among the known ones; 0 for None."""
    known = [reward for reward in rewards if reward is not None]
    if not known or max(known) - min(known) <= CONTRAST:
        return (0.0,) * len(rewards)
    mean, count = sum(known) / len(known), len(known)
    deviation = float(np.std(known, ddof=1)) + 1e-4
    scale = {"mean_std": deviation, "branch": deviation, "mean": 1.0, "leave_one_out": (count - 1) / count}[how]
    return tuple(0.0 if reward is None else (reward - mean) / scale for reward in rewards)


def _call_rewards(group: Group) -> dict[str | None, list[float]]:
    """Return the rewards of the group's rewarded calls by agent name, in the order of trajectories and calls."""
    rewards: dict[str | None, list[float]] = {}
    for trajectory in group.trajectories:
        for call in trajectory.calls:
            if call.reward is not None:
                rewards.setdefault(call.agent, []).append(call.reward)
    return rewards


def _rewarded_calls(trajectory: Trajectory) -> tuple[Call, ...]:
    """Return the calls with the rewards of ``trajectory.call_rewards``."""
    rewards = trajectory.call_rewards
    return tuple(
        replace(call, reward=rewards[index]) if index in rewards else call
        for index, call in enumerate(trajectory.calls)
    )


def _call_numbers(trajectory: Trajectory, reward: Reward | GroupReward) -> dict[int, float | None]:
    """Return the rewards that ``reward`` set in ``trajectory.call_rewards``, as floats."""
    rewards = trajectory.call_rewards
    unknown = [index for index in rewards if index not in range(len(trajectory.calls))]
    if unknown:
        raise RewardError(
            f"{_name(reward)} set call_rewards[{unknown[0]!r}] for {_describe(trajectory)}, which has "
            f"{len(trajectory.calls)} calls; the key is the call's index in trajectory.calls, from 0"
        )
    numbers = {index: _finite(value) for index, value in rewards.items()}
    for index, number in numbers.items():
        if number is None:
            raise RewardError(
                f"{_name(reward)} set call_rewards[{index}] to {reprlib.repr(rewards[index])} ({type(rewards[index]).__name__}) "
                f"for {_describe(trajectory)}; use a finite int, float or bool"
            )
    return numbers


async def _score_each(group: Group, reward: Reward) -> list[float | Unscorable]:
    async def one(trajectory: Trajectory) -> float | Unscorable:
        try:
            with interrupted():
                value = reward(trajectory)
            if inspect.isawaitable(value):
                value = await value
        except ConfigError:
            raise  # about the set-up, not about this rollout
        except BaseException as error:  # noqa: BLE001 - the boundary to the user's function
            hint = "; fix the reward function (a failed rollout has output None and its reason in trajectory.error)"
            return _raised(reward, error, f"{_describe(trajectory)}{hint}")
        return _returned(value, reward, trajectory)

    outcomes = await asyncio.gather(*map(one, group.trajectories), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, Unscorable):
            raise outcome
    return outcomes


async def _score_together(group: Group, reward: GroupReward) -> list[float | Unscorable | None]:
    task = f"the group of task {reprlib.repr(group.task)}"
    try:
        values = await reward.score(group)
    except ArtError as error:
        if isinstance(error, RewardError) and not isinstance(error, Unscorable):
            raise Unscorable(str(error), task) from error
        raise
    except BaseException as error:  # the boundary to the judge
        raise _raised(reward, error, task) from error
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
        raise Unscorable(
            f"{_name(reward)} returned {reprlib.repr(values)} instead of a list of rewards",
            f"{task}; return a list with one number (or None) per trajectory",
        )
    if len(values) != len(group.trajectories):
        raise Unscorable(
            f"{_name(reward)} returned {len(values)} rewards for {len(group.trajectories)} trajectories",
            f"{task}; return one per trajectory, in the same order, None if it has none",
        )
    return [
        None if value is None else _returned(value, reward, trajectory)
        for value, trajectory in zip(values, group.trajectories, strict=True)
    ]


def _raised(reward: Reward | GroupReward, raised: BaseException, where: str) -> Unscorable:
    """Return what the reward raised, with the line. Raises it if ``failure_of`` does."""
    error, lines = failure_of(raised), traceback.extract_tb(raised.__traceback__)
    at = f" ({lines[-1].filename}:{lines[-1].lineno})" if lines else ""
    return Unscorable(f"{_name(reward)} raised {describe_error(error)}{at}", where, error)


def _returned(value: Any, reward: Reward | GroupReward, trajectory: Trajectory) -> float | Unscorable:
    """Return what ``reward`` returned as a float, or why it isn't one."""
    if (number := _finite(value)) is not None:
        return number
    hint = ": is a 'return' missing?" if value is None else ""
    reason = f"{_name(reward)} returned {reprlib.repr(value)} ({type(value).__name__}{hint})"
    return Unscorable(reason, f"{_describe(trajectory)}; return a finite int, float or bool")


def _finite(value: Any) -> float | None:
    try:
        number = float(value) if isinstance(value, Real | np.bool_) else math.nan
    except OverflowError:  # an int beyond every float
        return None
    return number if math.isfinite(number) else None


def _check_added(reward: Reward | GroupReward, trajectory: Trajectory) -> None:
    """Raise RewardError for metrics that aren't numbers and notes that aren't text."""
    for name, value in trajectory.metrics.items():
        if not isinstance(value, Real | np.bool_):
            raise RewardError(
                f"{_name(reward)} set metrics[{name!r}] to {reprlib.repr(value)} ({type(value).__name__}) for "
                f"{_describe(trajectory)}; a metric must be a number"
            )
    for name, value in trajectory.notes.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise RewardError(
                f"{_name(reward)} set notes[{name!r}] to {reprlib.repr(value)} ({type(value).__name__}) for "
                f"{_describe(trajectory)}; a note must be text under a name"
            )


def _name(reward: Reward | GroupReward) -> str:
    return f"reward {getattr(reward, '__qualname__', type(reward).__qualname__)}"


def _describe(trajectory: Trajectory) -> str:
    return f"rollout {trajectory.rollout_id or '(no id)'} of task {reprlib.repr(trajectory.task)}"
