"""A run folder's rollouts by group, and a judge's opinions of them, stored beside their scores."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from art_core.errors import ConfigError
from art_core.plugin_api import gather_limited
from art_core.store import Store
from art_core.types import Group
from art_ruler.calibration import Preference
from art_ruler.ruler import Ruler
from art_ruler.view import common_start, text_of, view

__all__ = ["Opinions", "group_of", "groups_of", "groups_with", "pairs_of", "preferred", "second_opinions", "shown"]

AT_ONCE = 16
"""Groups in memory at a time; the judge limits its requests itself."""


@dataclass
class Opinions:
    """The result of judging stored groups."""

    judged: int = 0
    """Groups that were scored now."""
    already: int = 0
    """Groups that this judge had scored before."""
    unscored: Counter[str] = field(default_factory=Counter)
    """Number of groups without scores, by reason."""
    scores: dict[str, float] = field(default_factory=dict)
    """By rollout id."""


def groups_of(store: Store, *, split: str | None = None, step: int | None = None, least: int = 2) -> list[list[str]]:
    """Return the rollout ids of each group with at least ``least`` finished rollouts, in the order in which they started."""
    groups: dict[str, list[str]] = {}
    for rollout in store.rollouts(split=split, step=step):
        if rollout.finished:
            groups.setdefault(rollout.group or rollout.rollout_id, []).append(rollout.rollout_id)
    return [group for group in groups.values() if len(group) >= least]


def group_of(store: Store, rollout_ids: Iterable[str]) -> Group:
    """Load the rollouts as a group."""
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
    """Judge the groups and add scores and explanations to the store, marked ``aside``, so they never count as rewards.

    Groups that this judge has scored before are skipped, unless ``again``. Each group is stored as soon as it is judged. When the
    judge's budget is spent, the remaining groups are counted as unscored.
    """
    opinions = Opinions()
    with suppress(ConfigError):  # such as a missing key: raised again by the first question, if there is one to ask
        await asyncio.to_thread(ruler.prepare)

    async def judge(rollout_ids: Sequence[str]) -> None:
        await _opinion(store, rollout_ids, ruler, again, opinions)
        progress()

    await gather_limited((functools.partial(judge, rollout_ids) for rollout_ids in groups), asyncio.Semaphore(AT_ONCE))
    return opinions


async def _opinion(store: Store, rollout_ids: Sequence[str], ruler: Ruler, again: bool, opinions: Opinions) -> None:
    stored = (
        {} if again else {rollout_id: _opinion_of(store, rollout_id, ruler.signature) for rollout_id in rollout_ids}
    )
    if stored and None not in stored.values():
        opinions.already += 1
        opinions.scores |= stored
        return
    if reason := ruler.exhausted():
        opinions.unscored[reason] += 1
        return
    group = group_of(store, rollout_ids)
    for trajectory in group.trajectories:  # these notes and metrics are from the run's own reward
        trajectory.notes.clear()
        trajectory.metrics.clear()
    scores = await ruler.score(group, again=again)
    store.add_scores(
        rollout_ids,
        scores,
        metrics=[trajectory.metrics for trajectory in group.trajectories],
        notes=[trajectory.notes for trajectory in group.trajectories],
        by=ruler.signature,
        aside=True,
    )
    known = {rollout_id: score for rollout_id, score in zip(rollout_ids, scores, strict=True) if score is not None}
    opinions.scores |= known
    if known:
        opinions.judged += 1
    else:
        opinions.unscored[group.trajectories[0].notes["unscored"]] += 1


def _opinion_of(store: Store, rollout_id: str, by: str) -> float | None:
    own = [score.reward for score in store.scores(rollout_id) if score.aside and score.by == by]
    scored = [reward for reward in own if reward is not None]
    return scored[-1] if scored else None


def preferred(groups: Iterable[Sequence[str]], rewards: Mapping[str, float | None]) -> list[Preference]:
    """Return the preferences that rewards express, for all pairs within a group whose rewards are known and differ."""
    pairs = itertools.chain.from_iterable(itertools.combinations(group, 2) for group in groups)
    known = [(a, b) for a, b in pairs if rewards.get(a) is not None and rewards.get(b) is not None]
    return [Preference(*((a, b) if rewards[a] > rewards[b] else (b, a))) for a, b in known if rewards[a] != rewards[b]]


def pairs_of(groups: Sequence[Sequence[str]], seed: int) -> list[tuple[str, str]]:
    """Return one random pair from each group, in random order."""
    rng = random.Random(seed)
    pairs = [tuple(rng.sample(list(group), 2)) for group in groups]
    return rng.sample(pairs, len(pairs))


def shown(group: Group) -> tuple[str, list[str]]:
    """Return what a judge sees of the group, as text: what the rollouts have in common, and each one's own part."""
    views = [view(trajectory) for trajectory in group.trajectories]
    start = common_start([each.start for each in views])
    return text_of(start), [text_of(each.own_part(len(start))) for each in views]


def groups_with(store: Store, preferences: Iterable[Preference]) -> list[list[str]]:
    """Return the groups that contain the preferred pairs. Raises ConfigError for a pair that is not within one group."""
    groups = groups_of(store)
    group_index = {rollout_id: index for index, group in enumerate(groups) for rollout_id in group}
    indices: set[int] = set()
    for preference in preferences:
        better, worse = preference.better, preference.worse
        for rollout_id in (better, worse):
            if rollout_id not in group_index:
                raise ConfigError(
                    f"{store.path} has no finished rollout {rollout_id!r}, named in the preference {preference}"
                )
        if group_index[better] != group_index[worse]:
            raise ConfigError(
                f"{preference}: they are not in the same group; only rollouts of one group can be compared"
            )
        indices.add(group_index[better])
    return [groups[index] for index in sorted(indices)]
