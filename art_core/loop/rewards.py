"""The rewards of a run: resolving names, counting costs, storing scores; and ``weighted``, which combines several rewards."""

from __future__ import annotations

import asyncio
import functools
import inspect
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
    """Return the weighted sum of several rewards as one: ``art.weighted(judge=(0.7, judge), right=(0.3, is_right))``.

    A part is whatever ``reward=`` accepts. Weights are finite numbers and are not normalized; a part of weight 0 is only
    measured. Each part's own value is ``trajectory.metrics["reward/NAME"]``. A rollout that a part leaves unscored is unscored,
    and ``trajectory.notes["unscored"]`` names the part and its reason. Rewards of single calls add up with the weights. Each
    part sees a rollout with empty metrics and notes; if several parts use the same name for one, it belongs to the first part,
    and those of the others become ``PART/NAME``. Raises ConfigError if there are no parts, or one has no valid weight or reward.
    """
    form = (
        "pass parts as NAME=(weight, reward), such as art.weighted(judge=(0.7, judge), right=(0.3, is_right)); a weight is a "
        "finite number, a reward is a function of one trajectory, an object with `async def score(self, group)`, or a "
        "registered name"
    )
    if not parts:
        raise ConfigError(f"art.weighted() has no parts; {form}")
    for name, part in parts.items():
        weight, reward = part if isinstance(part, tuple | list) and len(part) == 2 else (None, None)
        has_weight = isinstance(weight, Real) and not isinstance(weight, bool) and math.isfinite(weight)
        if not has_weight or not (isinstance(reward, str) or is_reward(reward)):
            raise ConfigError(f"the part {name!r} of art.weighted is {part!r:.80}; {form}")
    return Weighted({name: (float(weight), reward) for name, (weight, reward) in parts.items()})


class Weighted:
    """The group reward that ``weighted`` returns."""

    def __init__(self, parts: Mapping[str, tuple[float, AnyReward]]) -> None:
        self.parts = dict(parts)
        weights = ", ".join(f"{name}={weight:g}" for name, (weight, _) in self.parts.items())
        self.__name__ = self.__qualname__ = f"weighted({weights})"  # for errors and the store

    def resolved(self, find: Callable[[AnyReward], Reward | GroupReward]) -> Weighted:
        """Return the sum with ``find`` applied to each part's reward; a ConfigError that it raises gets the part's name."""
        parts = {}
        for name, (weight, reward) in self.parts.items():
            try:
                parts[name] = weight, find(reward)
            except ConfigError as error:
                raise ConfigError(f"the part {name!r} of art.{self.__name__}: {error}") from error
        return Weighted(parts)

    async def score(self, group: Group) -> list[float | None]:
        """Return the weighted sum per trajectory, in order; None if a part is unscored. The parts score concurrently.

        Raises RewardError if a part does, or if a part is still a name, because only a run resolves names.
        """
        for name, (_, reward) in self.parts.items():
            if isinstance(reward, str):
                raise RewardError(
                    f"the part {name!r} of art.{self.__name__} is a name, {reward!r}, which only a run resolves: score with "
                    "run.score, or pass the object instead of its name"
                )
        # Each part gets its own metrics and notes, so that none overwrites what another adds.
        copies = [
            replace(group, trajectories=tuple(replace(t, metrics={}, notes={}) for t in group.trajectories))
            for _ in self.parts
        ]
        scoring = [values(copy, reward) for copy, (_, reward) in zip(copies, self.parts.values(), strict=True)]
        outcomes = await asyncio.gather(*scoring, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        sums = [
            self._sum(t, [copy.trajectories[index] for copy in copies], [rewards[index] for rewards in outcomes])
            for index, t in enumerate(group.trajectories)
        ]
        self._add_metrics_and_notes(group, copies)
        return sums

    def _sum(self, trajectory: Trajectory, copies: Sequence[Trajectory], rewards: list[float | None]) -> float | None:
        """Return a rollout's weighted sum and add its parts to ``trajectory``, or the reasons why there is no sum."""
        total, reasons = 0.0, []
        for (name, (weight, _)), copy, reward in zip(self.parts.items(), copies, rewards, strict=True):
            reason = copy.notes.pop("unscored", NO_REASON)
            trajectory.metrics.pop(f"reward/{name}", None)  # of an earlier scoring
            if reward is None:
                reasons.append(f"{name}: {reason}")
            else:
                trajectory.metrics[f"reward/{name}"] = reward
                total += weight * reward
            for index, call_reward in copy.call_rewards.items():
                trajectory.call_rewards[index] = trajectory.call_rewards.get(index, 0.0) + weight * call_reward
        if reasons:
            trajectory.notes["unscored"] = "; ".join(reasons)
        return None if reasons else total

    def _add_metrics_and_notes(self, group: Group, copies: Sequence[Group]) -> None:
        """Add what the parts set on their ``copies``; a name belongs to the first part that uses it for any rollout."""
        for attribute in ("metrics", "notes"):
            owners = {f"reward/{name}": "" for name in self.parts}
            for part, copy in zip(self.parts, copies, strict=True):
                for trajectory, scored in zip(group.trajectories, copy.trajectories, strict=True):
                    for name, value in getattr(scored, attribute).items():
                        is_owner = owners.setdefault(name, part) == part
                        getattr(trajectory, attribute)[name if is_owner else f"{part}/{name}"] = value


class Rewards:
    """The rewards of a run: each name is resolved once, and each metered reward is begun once.

    Rewards resolved before ``begin`` are begun there, so that an unknown name is refused before the run folder is opened.
    """

    def __init__(self, plugins: Plugins, run_dir: Path) -> None:
        self._plugins, self._run_dir = plugins, run_dir
        self._named: dict[str, Reward | GroupReward] = {}
        self._metered: list[MeteredReward] = []
        self._open = False

    def begin(self) -> None:
        """Begin the metered rewards, now that the run folder exists. Raises ConfigError if a reward can't work."""
        self._open = True
        for reward in self._metered:
            reward.begin(self._run_dir)

    def find(self, reward: AnyReward) -> Reward | GroupReward:
        """Return the reward of a registered name, a sum with its names resolved, or any other reward unchanged.

        Raises ConfigError for a name that no plugin registers, RewardError for what isn't a reward.
        """
        if isinstance(reward, str):
            if reward not in self._named:
                self._named[reward] = self.find(_made(reward, self._plugins.choose("register_rewards", reward)))
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
        """Return what the run's rewards have cost so far; totals of the same name add up."""
        totals: dict[str, float] = {}
        for reward in self._metered:
            for name, value in reward.account().items():
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def exhausted(self, reward: AnyReward | None = None) -> str | None:
        """Return why ``reward``, or one of its parts, can't score any more; None if all can. Default: any of the run's."""
        rewards = self._metered if reward is None else _metered(self.find(reward))
        return next(filter(None, (metered.exhausted() for metered in rewards)), None)


def _made(name: str, factory: Callable[[], Reward | GroupReward]) -> Reward | GroupReward:
    """Return what a registered factory makes. Raises ConfigError if a plugin registered the reward itself."""
    parameters = inspect.signature(factory).parameters.values()
    if any(p.default is p.empty and p.kind < p.VAR_POSITIONAL for p in parameters):
        raise ConfigError(
            f"the plugin of the reward {name!r} registered {reward_name(factory)}, which needs arguments; it must register a "
            f"factory: register({name!r}, lambda: {reward_name(factory)})"
        )
    return factory()


def _metered(reward: Reward | GroupReward) -> Iterator[MeteredReward]:
    """Yield the metered rewards: ``reward`` itself, or those among a sum's parts."""
    if isinstance(reward, Weighted):
        for _, part in reward.parts.values():
            yield from _metered(part)
    elif isinstance(reward, MeteredReward):
        yield reward


def reward_name(reward: Reward | GroupReward) -> str:
    """Return a reward's name in the store and in reports: its ``name`` if it has one, else its Python name."""
    name = getattr(reward, "name", None)
    return name if isinstance(name, str) else getattr(reward, "__name__", type(reward).__name__)


async def score_all(
    groups: Sequence[Group],
    score: Callable[[Group], Awaitable[Group]],
    keep: Callable[[Group], Group],
    gate: asyncio.Semaphore | None = None,
) -> list[Group]:
    """Return ``keep(await score(group))`` for each group; if the reward raises, the group is kept unscored.

    Raises Unscorable if the reward raises for all groups, because then the reward is wrong, not the groups.
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
    """Return the groups with rewards and advantages; ``score`` scores those in which a reward is missing.

    Raises Unscorable if the reward raises for all groups.
    """
    rest = [group for group in groups if any(t.reward is None for t in group.trajectories)]
    try:
        scored = await score(rest)
    except Unscorable as error:
        if len(rest) == len(groups):  # the reward never scored a group
            raise
        scored = [unscored(group, error) for group in rest]
    replaced = {id(group): new for group, new in zip(rest, scored, strict=True)}
    return [advantages(replaced.get(id(group), group), advantage) for group in groups]


def keep_scores(store: Store, by: str, advantage: str, group: Group) -> Group:
    """Add advantages to a group that the reward named ``by`` has scored, store both, and return the group."""
    group = advantages(group, advantage)
    trajectories = group.trajectories
    store.add_scores(
        [t.rollout_id for t in trajectories],
        [t.reward for t in trajectories],
        metrics=[t.metrics for t in trajectories],
        notes=[t.notes for t in trajectories],
        advantages=group.advantages,
        by=by,
        calls=[t.calls for t in trajectories],
    )
    return group
