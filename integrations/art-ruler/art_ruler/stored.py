"""The runs of a run folder, by groups, and a judge's opinion of them beside their scores. Knows nothing about terminals."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from art_core.errors import ConfigError
from art_core.runtime.gathering import gather_limited
from art_core.store import Store
from art_core.types import Group
from art_ruler.calibration import Preference
from art_ruler.ruler import Ruler
from art_ruler.view import common_start, text_of, view

__all__ = ["Opinions", "group_of", "groups_of", "groups_with", "pairs_of", "preferred", "second_opinions", "shown"]

AT_ONCE = 16
"""Groups in memory at a time; how many requests there are is the judge's matter."""


@dataclass
class Opinions:
    """What came of judging stored groups."""

    judged: int = 0
    """Groups that the judge scored now."""
    already: int = 0
    """Groups that had this judge's opinion before."""
    unscored: Counter[str] = field(default_factory=Counter)
    """Why groups have no scores, and how many."""
    scores: dict[str, float] = field(default_factory=dict)
    """By rollout id."""


def groups_of(store: Store, *, split: str | None = None, step: int | None = None, least: int = 2) -> list[list[str]]:
    """Return the rollout ids of every group with at least so many finished runs, in the order in which the groups began."""
    groups: dict[str, list[str]] = {}
    for rollout in store.rollouts(split=split, step=step):
        if rollout.finished:
            groups.setdefault(rollout.group or rollout.rollout_id, []).append(rollout.rollout_id)
    return [group for group in groups.values() if len(group) >= least]


def group_of(store: Store, rollout_ids: Iterable[str]) -> Group:
    """Return the runs as a group."""
    trajectories = tuple(map(store.trajectory, rollout_ids))
    return Group(trajectories[0].task, trajectories)


async def second_opinions(
    store: Store,
    groups: Sequence[Sequence[str]],
    ruler: Ruler,
    *,
    again: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> Opinions:
    """Judge the groups and add the scores and explanations to the store, aside: they never count as rewards.

    A group that has this judge's opinion is not judged once more, unless ``again``. Each group is written as soon as it is
    judged. Once the judge's budget is spent the rest is left, and counted as unscored.
    """
    found = Opinions()

    async def one(rollout_ids: Sequence[str]) -> None:
        await _opinion(store, rollout_ids, ruler, again, found)
        progress()

    await gather_limited((functools.partial(one, rollout_ids) for rollout_ids in groups), asyncio.Semaphore(AT_ONCE))
    return found


async def _opinion(store: Store, rollout_ids: Sequence[str], ruler: Ruler, again: bool, found: Opinions) -> None:
    kept = {} if again else {rollout_id: _opinion_of(store, rollout_id, ruler.name) for rollout_id in rollout_ids}
    if kept and None not in kept.values():
        found.already += 1
        found.scores |= kept
        return
    if reason := ruler.exhausted():
        found.unscored[reason] += 1
        return
    group = group_of(store, rollout_ids)
    for trajectory in group.trajectories:  # what is kept of the run's own reward is not this judge's
        trajectory.notes.clear()
        trajectory.metrics.clear()
    scores = await ruler.score(group)
    store.add_scores(
        rollout_ids,
        scores,
        metrics=[trajectory.metrics for trajectory in group.trajectories],
        notes=[trajectory.notes for trajectory in group.trajectories],
        by=ruler.name,
        aside=True,
    )
    known = {rollout_id: score for rollout_id, score in zip(rollout_ids, scores, strict=True) if score is not None}
    found.scores |= known
    if known:
        found.judged += 1
    else:
        found.unscored[group.trajectories[0].notes["unscored"]] += 1


def _opinion_of(store: Store, rollout_id: str, by: str) -> float | None:
    own = [it.reward for it in store.scores(rollout_id) if it.aside and it.by == by and it.reward is not None]
    return own[-1] if own else None


def preferred(groups: Iterable[Sequence[str]], rewards: Mapping[str, float | None]) -> list[Preference]:
    """Return what rewards prefer, in all pairs of a group whose rewards are known and differ."""
    pairs = itertools.chain.from_iterable(itertools.combinations(group, 2) for group in groups)
    known = [(a, b) for a, b in pairs if rewards.get(a) is not None and rewards.get(b) is not None]
    return [Preference(*((a, b) if rewards[a] > rewards[b] else (b, a))) for a, b in known if rewards[a] != rewards[b]]


def pairs_of(groups: Sequence[Sequence[str]], seed: int) -> list[tuple[str, str]]:
    """Return one random pair of every group, in random order."""
    rng = random.Random(seed)
    pairs = [tuple(rng.sample(list(group), 2)) for group in groups]
    return rng.sample(pairs, len(pairs))


def shown(group: Group) -> tuple[str, list[str]]:
    """Return what a judge is shown of the group, as text: what the runs have in common, and each run's own part."""
    views = [view(trajectory) for trajectory in group.trajectories]
    start = common_start([it.start for it in views])
    return text_of(start), [text_of(it.own_part(len(start))) for it in views]


def groups_with(store: Store, preferences: Iterable[Preference]) -> list[list[str]]:
    """Return the groups in which the preferred pairs are. Raises ConfigError for a pair that is not within one group."""
    groups = groups_of(store)
    place = {rollout_id: number for number, group in enumerate(groups) for rollout_id in group}
    wanted: set[int] = set()
    for it in preferences:
        for rollout_id in (it.better, it.worse):
            if rollout_id not in place:
                raise ConfigError(f"{store.path} has no finished run {rollout_id!r}, which the preference {it} names")
        if place[it.better] != place[it.worse]:
            raise ConfigError(f"{it}: the two are not of one group; only runs of one task can be compared")
        wanted.add(place[it.better])
    return [groups[number] for number in sorted(wanted)]
