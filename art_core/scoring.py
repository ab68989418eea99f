"""Group -> rewards -> advantages. Knows nothing about tokens, models or how a run came about."""

from __future__ import annotations

import asyncio
import inspect
import math
import reprlib
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np

from art_core.errors import ConfigError, RewardError
from art_core.types import Group, GroupReward, Reward, Trajectory

CONTRAST = 1e-8
"""Rewards that differ by less are equal: sums of floats in another order differ by about 1e-16."""


async def score(group: Group, reward: Reward | GroupReward) -> Group:
    """Return ``group`` with every trajectory's ``reward`` set; advantages of an earlier scoring are dropped.

    ``reward`` is a function of one trajectory (a plain function is called directly; coroutines of one group run
    concurrently), or an object with ``async score(group)``, which may answer None for a trajectory it cannot score.
    A trajectory whose run failed is scored like any other: the function sees ``trajectory.error``, and what a failure
    is worth is its decision. Raises RewardError for what is not a finite number per trajectory, and from any exception
    that the reward raises.
    """
    if isinstance(reward, type) or not (callable(reward) or callable(getattr(reward, "score", None))):
        raise RewardError(
            f"{reward!r} is not a reward; give a function of one trajectory, "
            "or an instance of a class with `async def score(self, group)`"
        )
    if callable(getattr(reward, "score", None)):
        rewards = await _score_together(group, reward)
    else:
        rewards = await _score_each(group, reward)
    scored = (replace(trajectory, reward=value) for trajectory, value in zip(group.trajectories, rewards, strict=True))
    return replace(group, trajectories=tuple(scored), advantages=())


def has_contrast(group: Group) -> bool:
    """Whether two of the group's rewards differ; without that there is nothing to learn from it."""
    rewards = _known_rewards(group)
    return len(rewards) > 1 and max(rewards) - min(rewards) > CONTRAST


def advantages(group: Group, how: str = "mean_std") -> Group:
    """Return ``group`` with one advantage per trajectory, relative to the group's scored trajectories.

    ``how``: ``"mean_std"`` is (reward - mean) / (std + 1e-4) with the sample's standard deviation (n - 1), ``"mean"``
    is reward - mean. Unscored trajectories get 0, and all do in a group without contrast. Raises ConfigError for
    another ``how``.
    """
    if how not in ("mean_std", "mean"):
        raise ConfigError(f"advantage={how!r} is unknown; use 'mean_std' or 'mean'")
    if not has_contrast(group):
        return replace(group, advantages=(0.0,) * len(group.trajectories))
    rewards = _known_rewards(group)
    mean = sum(rewards) / len(rewards)
    scale = float(np.std(rewards, ddof=1)) + 1e-4 if how == "mean_std" else 1.0
    values = (0.0 if t.reward is None else (t.reward - mean) / scale for t in group.trajectories)
    return replace(group, advantages=tuple(values))


def _known_rewards(group: Group) -> list[float]:
    return [trajectory.reward for trajectory in group.trajectories if trajectory.reward is not None]


async def _score_each(group: Group, reward: Reward) -> list[float]:
    async def one(trajectory: Trajectory) -> float:
        try:
            value = reward(trajectory)
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:  # the boundary to the user's function: its bug is reported as its bug
            raise RewardError(
                f"{_name(reward)} raised {type(error).__name__}: {error}, for {_describe(trajectory)}; "
                "correct the reward function (a failed run has output None and its reason in trajectory.error)"
            ) from error
        _check_metrics(reward, trajectory)
        return _number(value, reward, trajectory)

    outcomes = await asyncio.gather(*map(one, group.trajectories), return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


async def _score_together(group: Group, reward: GroupReward) -> list[float | None]:
    try:
        values = await reward.score(group)
    except RewardError:
        raise
    except Exception as error:  # the boundary to the judge
        raise RewardError(
            f"{_name(reward)} raised {type(error).__name__}: {error}, for the group of task {reprlib.repr(group.task)}"
        ) from error
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
        raise RewardError(
            f"{_name(reward)} returned {reprlib.repr(values)} for a group; "
            "return a list with one number (or None) per trajectory"
        )
    if len(values) != len(group.trajectories):
        raise RewardError(
            f"{_name(reward)} returned {len(values)} rewards for a group of {len(group.trajectories)} trajectories "
            f"(task {reprlib.repr(group.task)}); return one per trajectory, in the same order, None where there is none"
        )
    return [
        None if value is None else _number(value, reward, trajectory)
        for value, trajectory in zip(values, group.trajectories, strict=True)
    ]


def _number(value: Any, reward: Reward | GroupReward, trajectory: Trajectory) -> float:
    number = float(value) if isinstance(value, Real | np.bool_) else math.nan
    if math.isfinite(number):
        return number
    hint = " (is a `return` missing?)" if value is None else ""
    raise RewardError(
        f"{_name(reward)} returned {reprlib.repr(value)} ({type(value).__name__}) for {_describe(trajectory)}{hint}; "
        "return a finite int, float or bool"
    )


def _check_metrics(reward: Reward | GroupReward, trajectory: Trajectory) -> None:
    for name, value in trajectory.metrics.items():
        if not isinstance(value, Real | np.bool_):
            raise RewardError(
                f"{_name(reward)} set metrics[{name!r}] to {reprlib.repr(value)} ({type(value).__name__}) for "
                f"{_describe(trajectory)}; a metric is a number"
            )


def _name(reward: Reward | GroupReward) -> str:
    return f"the reward {getattr(reward, '__qualname__', type(reward).__qualname__)}"


def _describe(trajectory: Trajectory) -> str:
    return f"rollout {trajectory.rollout_id or '(no id)'} of task {reprlib.repr(trajectory.task)}"
