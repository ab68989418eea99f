"""The rewards of a run: names looked up, costs begun and counted, and ``weighted``, which makes one reward of several.

Knows nothing about what a reward looks at.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError, RewardError
from art_core.plugins import Plugins
from art_core.runtime.gathering import gather_limited
from art_core.scoring import NO_REASON, Unscorable, advantages, check_reward, is_reward, unscored, values
from art_core.store import Store
from art_core.types import Group, GroupReward, MeteredReward, Reward, Trajectory

AnyReward = str | Reward | GroupReward
"""What ``reward=`` takes; text is a registered name."""


def weighted(**parts: tuple[float, AnyReward]) -> Weighted:
    """Return the weighted sum of several rewards as one: ``art.weighted(judge=(0.7, "ruler"), right=(0.3, is_right))``.

    A part is whatever ``reward=`` takes. Weights are finite numbers and count as they are: their sum need not be 1, and 0 only
    measures. Each part's own value stands in ``trajectory.metrics["reward/NAME"]``. A run that a part leaves unscored is
    unscored; ``trajectory.notes["unscored"]`` names the part and its reason. Rewards that parts give to single calls add up with
    the weights. A metric or a note that several parts set under one name is the first part's; the others' are called
    ``PART/NAME``. Raises ConfigError for no parts, and for what is no weight or no reward.
    """
    if not parts:
        raise ConfigError(f"art.weighted() has no parts: {_FORM}")
    return Weighted({name: _part(name, given) for name, given in parts.items()})


_FORM = 'give each as NAME=(weight, reward), such as art.weighted(judge=(0.7, "ruler"), right=(0.3, is_right))'


@dataclass(frozen=True)
class _Part:
    weight: float
    reward: AnyReward


def _part(name: str, given: Any) -> _Part:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ConfigError(f"the part {name!r} of art.weighted is {given!r:.80}: {_FORM}")
    weight, reward = given
    if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
        raise ConfigError(
            f"the weight of the part {name!r} of art.weighted is {weight!r:.80}, not a finite number: {_FORM}"
        )
    if not isinstance(reward, str) and not is_reward(reward):
        raise ConfigError(
            f"the part {name!r} of art.weighted is {reward!r:.80}, which is not a reward: give a function of one trajectory, an "
            "object with `async def score(self, group)`, or a registered name"
        )
    return _Part(float(weight), reward)


class Weighted:
    """What ``weighted`` returns: a group reward that costs what its parts cost."""

    def __init__(self, parts: Mapping[str, _Part]) -> None:
        self._parts = dict(parts)
        said = ", ".join(f"{name}={part.weight:g}" for name, part in self._parts.items())
        # What errors and the store call it.
        self.__name__ = self.__qualname__ = f"weighted({said})"

    @property
    def rewards(self) -> list[AnyReward]:
        """The rewards of the parts."""
        return [part.reward for part in self._parts.values()]

    def found(self, find: Callable[[AnyReward], Reward | GroupReward]) -> Weighted:
        """Return the same sum with each part's reward as ``find`` returns it. Raises ConfigError that names the part."""
        parts = {}
        for name, part in self._parts.items():
            try:
                parts[name] = replace(part, reward=find(part.reward))
            except ConfigError as error:
                raise ConfigError(f"the part {name!r} of art.{self.__name__}: {error}") from error
        return Weighted(parts)

    async def score(self, group: Group) -> list[float | None]:
        """Return the weighted sum per trajectory, in order; None where a part has none. Parts score at the same time.

        Raises RewardError as the parts do, and for a part that is a name still: a run looks names up.
        """
        for name, part in self._parts.items():
            if isinstance(part.reward, str):
                raise RewardError(
                    f"the part {name!r} of art.{self.__name__} is a name, {part.reward!r}, which only a run looks up: score with "
                    "run.score, or give the object instead of its name"
                )
        # Each part gets runs of its own to put things into, so that none overwrites what another says.
        copies = [replace(group, trajectories=tuple(map(_copy, group.trajectories))) for _ in self._parts]
        outcomes = await asyncio.gather(
            *(values(copy, part.reward) for copy, part in zip(copies, self._parts.values(), strict=True)),
            return_exceptions=True,
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        by_run = zip(*(copy.trajectories for copy in copies), strict=True)
        rewards = [
            self._sum(whole, its, given)
            for whole, its, given in zip(group.trajectories, by_run, zip(*outcomes, strict=True), strict=True)
        ]
        self._put(
            [it.metrics for it in group.trajectories], [[it.metrics for it in copy.trajectories] for copy in copies]
        )
        self._put([it.notes for it in group.trajectories], [[it.notes for it in copy.trajectories] for copy in copies])
        return rewards

    def _sum(self, whole: Trajectory, its: Sequence[Trajectory], given: Sequence[float | None]) -> float | None:
        """Return one run's weighted sum, and note its parts, or why there is none; ``its`` are the parts' copies of the run."""
        missing = []
        for (name, part), copy, value in zip(self._parts.items(), its, given, strict=True):
            reason = copy.notes.pop("unscored", NO_REASON)
            whole.metrics.pop(f"reward/{name}", None)
            if value is None:
                missing.append(f"{name}: {reason}")
            else:
                whole.metrics[f"reward/{name}"] = value
            for index, of_call in copy.call_rewards.items():
                whole.call_rewards[index] = whole.call_rewards.get(index, 0.0) + part.weight * of_call
        if missing:
            whole.notes["unscored"] = "; ".join(missing)
            return None
        return sum(part.weight * value for part, value in zip(self._parts.values(), given, strict=True))

    def _put(self, runs: Sequence[dict[str, Any]], parts: Sequence[Sequence[_Said]]) -> None:
        """Put what each part said of the runs into ``runs``; a name is the first part's, over all runs."""
        first = {f"reward/{name}": "" for name in self._parts}
        for name, part in zip(self._parts, parts, strict=True):
            for into, of_run in zip(runs, part, strict=True):
                for key, value in of_run.said().items():
                    into[key if first.setdefault(key, name) == name else f"{name}/{key}"] = value

    def metered(self) -> list[MeteredReward]:
        """Return the parts that cost something, each once."""
        found: list[MeteredReward] = []
        for part in self._parts.values():
            if isinstance(part.reward, Weighted):
                found += part.reward.metered()
            elif isinstance(part.reward, MeteredReward):
                found.append(part.reward)
        return list({id(it): it for it in found}.values())

    def begin(self, run_dir: Path) -> None:
        """Begin the parts that cost something."""
        for it in self.metered():
            it.begin(run_dir)

    def account(self) -> dict[str, float]:
        """Return the parts' totals; those of one name add up."""
        return _totals(self.metered())

    def exhausted(self) -> str | None:
        """Return the reason of the first part that can score nothing more."""
        return _first_reason(self.metered())


class Rewards:
    """The rewards that a run was asked for: what is named is made once, what costs something is begun once.

    What is found before ``begin`` is begun by it, so that a name that nobody has is refused before the run is opened.
    """

    def __init__(self, plugins: Plugins, run_dir: Path) -> None:
        self._plugins, self._run_dir = plugins, run_dir
        self._named: dict[str, Reward | GroupReward] = {}
        self._sums: dict[Weighted, Weighted] = {}
        self._metered: list[MeteredReward] = []
        self._open = False

    def begin(self) -> None:
        """Begin what costs something: the run folder is there. Raises ConfigError where a reward cannot work."""
        self._open = True
        for reward in self._metered:
            reward.begin(self._run_dir)

    def find(self, reward: AnyReward) -> Reward | GroupReward:
        """Return what a reward's name stands for, a sum with its names looked up, anything else as it is; begun.

        Raises ConfigError for a name that no plugin registers, RewardError for what is no reward.
        """
        if isinstance(reward, str):
            if reward not in self._named:
                self._named[reward] = self.find(self._plugins.choose("register_rewards", reward)())
            return self._named[reward]
        if isinstance(reward, Weighted):
            if reward not in self._sums:
                self._sums[reward] = reward.found(self.find)
            return self._sums[reward]
        check_reward(reward)
        if isinstance(reward, MeteredReward) and not any(it is reward for it in self._metered):
            self._metered.append(reward)
            if self._open:
                reward.begin(self._run_dir)
        return reward

    def account(self) -> dict[str, float]:
        """Return what the run's rewards have cost so far; totals of one name add up."""
        return _totals(self._metered)

    def exhausted(self, reward: AnyReward | None = None) -> str | None:
        """Return why ``reward`` can score nothing more, None while it can; without ``reward`` for the first that cannot."""
        found = self._metered if reward is None else [self.find(reward)]
        return _first_reason([it for it in found if isinstance(it, MeteredReward)])


def name_of(reward: Reward | GroupReward) -> str:
    """Return what a reward is called in the store and in reports: its ``name``, where it has one, else its Python name."""
    name = getattr(reward, "name", None)
    return name if isinstance(name, str) else getattr(reward, "__name__", type(reward).__name__)


async def score_all(
    groups: Sequence[Group],
    score: Callable[[Group], Awaitable[Group]],
    keep: Callable[[Group], Group],
    gate: asyncio.Semaphore | None = None,
) -> list[Group]:
    """Return what ``keep`` makes of each group that ``score`` has scored; a group for which the reward raises is unscored.

    Raises Unscorable if it raises for all groups: then the reward is wrong, and not what it was shown.
    """
    failed: list[Unscorable] = []

    async def one(group: Group) -> Group:
        try:
            return keep(await score(group))
        except Unscorable as error:
            failed.append(error)
            return keep(unscored(group, error))

    found = await gather_limited([functools.partial(one, group) for group in groups], gate)
    if failed and len(failed) == len(groups):
        raise failed[0]
    return found


async def score_rest(
    groups: Sequence[Group], score: Callable[[list[Group]], Awaitable[list[Group]]], advantage: str
) -> list[Group]:
    """Return the groups with rewards and advantages: those that have rewards keep them, ``score`` scores the rest.

    Raises Unscorable if the reward raises for all groups.
    """
    done = [all(t.reward is not None for t in group.trajectories) for group in groups]
    rest = [group for group, scored in zip(groups, done, strict=True) if not scored]
    try:
        fresh = iter(await score(rest))
    except Unscorable as error:  # the stored scores say so too
        if not any(done):
            raise
        fresh = iter([advantages(unscored(group, error), advantage) for group in rest])
    return [advantages(group, advantage) if scored else next(fresh) for group, scored in zip(groups, done, strict=True)]


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


class _Said(dict[str, Any]):
    """A dict that knows what was put into it after it was made, the same value as before too."""

    def __init__(self, before: Mapping[str, Any]) -> None:
        super().__init__(before)
        self._names: dict[str, None] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._names[name] = None

    def update(self, *given: Any, **named: Any) -> None:
        for name, value in dict(*given, **named).items():
            self[name] = value

    def __ior__(self, given: Any) -> _Said:
        self.update(given)
        return self

    def setdefault(self, name: str, value: Any = None) -> Any:
        if name not in self:
            self[name] = value
        return self[name]

    def __reduce__(self) -> tuple[type[dict], tuple[dict[str, Any]]]:
        # A reward may send its run to another process: there it is a dict like any other.
        return dict, (dict(self),)

    def said(self) -> dict[str, Any]:
        """Return what was put in and is there still."""
        return {name: self[name] for name in self._names if name in self}


def _copy(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, metrics=_Said(trajectory.metrics), notes=_Said(trajectory.notes))


def _totals(rewards: Sequence[MeteredReward]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for reward in rewards:
        for name, value in reward.account().items():
            totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def _first_reason(rewards: Sequence[MeteredReward]) -> str | None:
    return next(filter(None, (reward.exhausted() for reward in rewards)), None)
