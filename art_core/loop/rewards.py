"""The rewards of a run: names resolved, costs counted, scores stored, and ``weighted``, which makes one reward of several."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path

from art_core.errors import ConfigError, RewardError
from art_core.plugins import Plugins
from art_core.runtime.gathering import gather_limited
from art_core.scoring import NO_REASON, Unscorable, advantages, check_reward, is_reward, unscored, values
from art_core.store import Store
from art_core.types import Group, GroupReward, MeteredReward, Reward, Trajectory

AnyReward = str | Reward | GroupReward
"""What ``reward=`` accepts; a string is a registered name."""


def weighted(**parts: tuple[float, AnyReward]) -> Weighted:
    """Return the weighted sum of several rewards as one: ``art.weighted(judge=(0.7, "ruler"), right=(0.3, is_right))``.

    A part is whatever ``reward=`` accepts. Weights are finite numbers and are not normalized; a part of weight 0 is only
    measured. Each part's own value is ``trajectory.metrics["reward/NAME"]``. A rollout that a part leaves unscored is unscored,
    and ``trajectory.notes["unscored"]`` names the part and its reason. Rewards of single calls add up with the weights. Each
    part sees a rollout with empty metrics and notes; if several parts add one of the same name, the first part's keeps it and
    the others' become ``PART/NAME``. Raises ConfigError if there are no parts, or one has no valid weight or reward.
    """
    form = 'pass each as NAME=(weight, reward), such as art.weighted(judge=(0.7, "ruler"), right=(0.3, is_right))'
    if not parts:
        raise ConfigError(f"art.weighted() has no parts: {form}")
    for name, part in parts.items():
        described = f"the part {name!r} of art.weighted"
        if not isinstance(part, tuple | list) or len(part) != 2:
            raise ConfigError(f"{described} is {part!r:.80}: {form}")
        weight, reward = part
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
            raise ConfigError(f"the weight of {described} is {weight!r:.80}, not a finite number: {form}")
        if not isinstance(reward, str) and not is_reward(reward):
            raise ConfigError(
                f"{described} is {reward!r:.80}, which isn't a reward: pass a function of one trajectory, an object with "
                "`async def score(self, group)`, or a registered name"
            )
    return Weighted({name: (float(weight), reward) for name, (weight, reward) in parts.items()})


class Weighted:
    """The sum that ``weighted`` returns, a group reward."""

    def __init__(self, parts: Mapping[str, tuple[float, AnyReward]]) -> None:
        self.parts = dict(parts)
        weights = ", ".join(f"{name}={weight:g}" for name, (weight, _) in self.parts.items())
        self.__name__ = self.__qualname__ = f"weighted({weights})"  # errors and the store show it

    def resolved(self, find: Callable[[AnyReward], Reward | GroupReward]) -> Weighted:
        """Return the sum of what ``find`` returns for each part's reward. Its ConfigErrors get the name of the part."""
        parts = {}
        for name, (weight, reward) in self.parts.items():
            try:
                parts[name] = weight, find(reward)
            except ConfigError as error:
                raise ConfigError(f"the part {name!r} of art.{self.__name__}: {error}") from error
        return Weighted(parts)

    async def score(self, group: Group) -> list[float | None]:
        """Return the weighted sum per trajectory, in order; None if a part has none. The parts score concurrently.

        Raises RewardError as the parts do, and for a part that is still a name: only a run resolves names.
        """
        for name, (_, reward) in self.parts.items():
            if isinstance(reward, str):
                raise RewardError(
                    f"the part {name!r} of art.{self.__name__} is a name, {reward!r}, which only a run resolves: score with "
                    "run.score, or pass the object instead of its name"
                )
        # Each part gets metrics and notes of its own, so that none overwrites what another adds.
        copies = [
            replace(group, trajectories=tuple(replace(t, metrics={}, notes={}) for t in group.trajectories))
            for _ in self.parts
        ]
        scoring = [values(copy, reward) for copy, (_, reward) in zip(copies, self.parts.values(), strict=True)]
        outcomes = await asyncio.gather(*scoring, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        by_run = zip(group.trajectories, *(copy.trajectories for copy in copies), strict=True)
        sums = [
            self._sum(*run, rewards=rewards) for run, rewards in zip(by_run, zip(*outcomes, strict=True), strict=True)
        ]
        self._add_metrics_and_notes(group, copies)
        return sums

    def _sum(self, whole: Trajectory, *copies: Trajectory, rewards: Sequence[float | None]) -> float | None:
        """Return a rollout's weighted sum and add its parts to ``whole``, or the reasons why there is no sum."""
        total, reasons = 0.0, []
        for (name, (weight, _)), copy, reward in zip(self.parts.items(), copies, rewards, strict=True):
            reason = copy.notes.pop("unscored", NO_REASON)
            whole.metrics.pop(f"reward/{name}", None)  # of an earlier scoring
            if reward is None:
                reasons.append(f"{name}: {reason}")
            else:
                whole.metrics[f"reward/{name}"] = reward
                total += weight * reward
            for index, of_call in copy.call_rewards.items():
                whole.call_rewards[index] = whole.call_rewards.get(index, 0.0) + weight * of_call
        if reasons:
            whole.notes["unscored"] = "; ".join(reasons)
        return None if reasons else total

    def _add_metrics_and_notes(self, group: Group, copies: Sequence[Group]) -> None:
        """Add what the parts added to their ``copies``; a name belongs to the first part that uses it for any rollout."""
        for attribute in ("metrics", "notes"):
            owners = {f"reward/{name}": "" for name in self.parts}
            for part, copy in zip(self.parts, copies, strict=True):
                for whole, of_part in zip(group.trajectories, copy.trajectories, strict=True):
                    for name, value in getattr(of_part, attribute).items():
                        is_owner = owners.setdefault(name, part) == part
                        getattr(whole, attribute)[name if is_owner else f"{part}/{name}"] = value


class Rewards:
    """The rewards of a run: each name is resolved once, each reward that costs something is begun once.

    Those resolved before ``begin`` are begun by it, so that an unknown name is refused before the run folder is opened.
    """

    def __init__(self, plugins: Plugins, run_dir: Path) -> None:
        self._plugins, self._run_dir = plugins, run_dir
        self._named: dict[str, Reward | GroupReward] = {}
        self._metered: list[MeteredReward] = []
        self._open = False

    def begin(self) -> None:
        """Begin what costs something, now that the run folder exists. Raises ConfigError if a reward cannot work."""
        self._open = True
        for reward in self._metered:
            reward.begin(self._run_dir)

    def find(self, reward: AnyReward) -> Reward | GroupReward:
        """Return the reward of a registered name, a sum with its names resolved, anything else as it is; begun.

        Raises ConfigError for a name that no plugin registers, RewardError for what isn't a reward.
        """
        if isinstance(reward, str):
            if reward not in self._named:
                self._named[reward] = self.find(self._plugins.choose("register_rewards", reward)())
            return self._named[reward]
        if isinstance(reward, Weighted):
            return reward.resolved(self.find)
        check_reward(reward)
        if isinstance(reward, MeteredReward) and not any(reward is known for known in self._metered):
            self._metered.append(reward)
            if self._open:
                reward.begin(self._run_dir)
        return reward

    def account(self) -> dict[str, float]:
        """Return what the run's rewards have cost so far; totals of one name add up."""
        totals: dict[str, float] = {}
        for reward in self._metered:
            for name, value in reward.account().items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def exhausted(self, reward: AnyReward | None = None) -> str | None:
        """Return why ``reward``, or a part of it, can score nothing more; without ``reward``, any of the run. None if all can."""
        rewards = self._metered if reward is None else _metered(self.find(reward))
        return next(filter(None, (metered.exhausted() for metered in rewards)), None)


def _metered(reward: Reward | GroupReward) -> Iterator[MeteredReward]:
    """Yield the rewards that cost something: ``reward`` itself, or parts of the sum."""
    if isinstance(reward, Weighted):
        for _, part in reward.parts.values():
            yield from _metered(part)
    elif isinstance(reward, MeteredReward):
        yield reward


def name_of(reward: Reward | GroupReward) -> str:
    """Return a reward's name in the store and in reports: its ``name`` if it has one, else its Python name."""
    name = getattr(reward, "name", None)
    return name if isinstance(name, str) else getattr(reward, "__name__", type(reward).__name__)


async def score_all(
    groups: Sequence[Group],
    score: Callable[[Group], Awaitable[Group]],
    keep: Callable[[Group], Group],
    gate: asyncio.Semaphore | None = None,
) -> list[Group]:
    """Return ``keep(await score(group))`` of each group; a group for which the reward raises is kept unscored.

    Raises Unscorable if it raises for all groups: then the reward is wrong, not the group.
    """
    errors: list[Unscorable] = []

    async def one(group: Group) -> Group:
        try:
            return keep(await score(group))
        except Unscorable as error:
            errors.append(error)
            return keep(unscored(group, error))

    scored = await gather_limited([functools.partial(one, group) for group in groups], gate)
    if errors and len(errors) == len(groups):
        raise errors[0]
    return scored


async def score_rest(
    groups: Sequence[Group], score: Callable[[list[Group]], Awaitable[list[Group]]], advantage: str
) -> list[Group]:
    """Return the groups with rewards and advantages: those with rewards keep them, ``score`` scores the rest.

    Raises Unscorable if the reward raises for all groups.
    """
    done = [all(t.reward is not None for t in group.trajectories) for group in groups]
    rest = [group for group, is_done in zip(groups, done, strict=True) if not is_done]
    try:
        scored = iter(await score(rest))
    except Unscorable as error:
        if not any(done):  # the reward never scored a group
            raise
        scored = iter([unscored(group, error) for group in rest])
    whole = [group if is_done else next(scored) for group, is_done in zip(groups, done, strict=True)]
    return [advantages(group, advantage) for group in whole]


def keep_scores(store: Store, by: str, advantage: str, group: Group) -> Group:
    """Return a group that the reward named ``by`` has scored with its advantages, and store both."""
    group = advantages(group, advantage)
    runs = group.trajectories
    store.add_scores(
        [t.rollout_id for t in runs],
        [t.reward for t in runs],
        metrics=[t.metrics for t in runs],
        notes=[t.notes for t in runs],
        advantages=group.advantages,
        by=by,
        call_rewards=[[call.reward for call in t.calls] for t in runs],
    )
    return group
