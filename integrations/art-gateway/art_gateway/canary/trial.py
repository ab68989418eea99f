"""The comparison of a candidate with what answers otherwise, at one share of the conversations, and what follows from it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from art_core.types import JsonDict
from art_gateway.canary.bounds import Bounds

WAITING = 1000
"""Pairs whose scores of one side may wait for those of the other; of more, the oldest are left out."""


@dataclass(frozen=True)
class Rule:
    """When a candidate's share grows, and when it loses all."""

    ramp: tuple[float, ...]
    """The shares that it has one after the other, growing."""
    margin: float = 0.05
    """How much lower its mean score may be; scores are from 0 to 1."""
    alpha: float = 0.05
    """The chance, over all steps of the ramp and all times, that a candidate that isn't worse loses its share; and the chance
    that one that is worse by the margin, or fails too often, gets to any further step."""
    failures: float = 0.05
    """The share of its calls that may fail. Those that fail together, because it is down, are one."""
    block: int = 200
    """Pairs of scores, or calls, after which the newest are looked at on their own again: a candidate that turns bad after a
    long good time is found by these."""

    def next_share(self, share: float) -> float | None:
        """Return the step of the ramp after a share; None after the last."""
        return next((step for step in self.ramp if step > share), None)


@dataclass(frozen=True)
class Verdict:
    """What has been shown."""

    passed: bool
    why: str


class Difference:
    """The candidate's mean score less the other's, with bounds of which each is wrong with a chance of at most ``level`` / 2.

    It is the mean of pairs: one score of the rarer side and as many of the other's as there are for each at this ``share`` of
    the candidate's, in the order in which they arrive. So what changes for both in time, such as harder questions, cancels.
    """

    def __init__(self, level: float, share: float) -> None:
        self._pairs = Bounds(level)
        """Differences between -1 and 1 are taken as means between 0 and 1."""
        odds = share / (1 - share) if 0 < share < 1 else 1.0
        self._needed = {True: max(1, round(odds)), False: max(1, round(1 / odds))}
        self._waiting = {side: deque[float](maxlen=WAITING * needed) for side, needed in self._needed.items()}

    def add(self, score: float, *, candidate: bool) -> None:
        """Add the score of a conversation."""
        self._waiting[candidate].append(score)
        if all(len(self._waiting[side]) >= needed for side, needed in self._needed.items()):
            candidates, others = (self._take(side) for side in (True, False))
            self._pairs.add((1 + candidates - others) / 2)

    def _take(self, side: bool) -> float:
        needed = self._needed[side]
        return sum(self._waiting[side].popleft() for _ in range(needed)) / needed

    @property
    def count(self) -> int:
        """How many pairs there are."""
        return self._pairs.count

    @property
    def mean(self) -> float | None:
        """The mean of the pairs; None without any."""
        mean = self._pairs.mean
        return None if mean is None else 2 * mean - 1

    @property
    def lower(self) -> float:
        """The lower bound."""
        return 2 * self._pairs.lower - 1

    @property
    def upper(self) -> float:
        """The upper bound."""
        return 2 * self._pairs.upper - 1


@dataclass
class Evidence:
    """How the candidate's scores differ from the other's, and how often it fails."""

    rule: Rule
    difference: Difference
    failures: Bounds

    def against(self) -> str | None:
        """Return what shows that the candidate is worse, or fails too often; None if nothing does."""
        if self.failures.lower > self.rule.failures:
            return (
                f"more than {self.failures.lower:.1%} of its calls fail, by {self.failures.count} of them; "
                f"{self.rule.failures:.1%} may"
            )
        if self.difference.upper < 0:
            return f"its scores are lower, by {-self.difference.upper:.3f} or more"
        return None

    def in_favour(self) -> str | None:
        """Return what shows that the candidate isn't worse by the margin, and doesn't fail too often; None if nothing does."""
        lower, failures = self.difference.lower, self.failures.upper
        if lower <= -self.rule.margin or failures >= self.rule.failures:
            return None
        how = f"higher, by {lower:.3f} or more" if lower > 0 else f"lower by less than {-lower:.3f}, if at all"
        return f"its scores are {how}, and fewer than {failures:.1%} of its calls fail"

    def as_json(self) -> JsonDict:
        """Return counts, means and bounds."""
        return {
            name: {"count": it.count, "mean": it.mean, "lower": it.lower, "upper": it.upper}
            for name, it in (("difference", self.difference), ("failures", self.failures))
        }


class Trial:
    """All evidence at one share, and that of the newest blocks of scores and of calls. It may be looked at any time.

    Each step of the ramp spends its part of ``alpha``: half on all evidence, half on the blocks, the j-th of which has
    6 / (pi j)^2 of it, so that all of them together stay within it however many there are.
    """

    def __init__(self, rule: Rule, share: float) -> None:
        self._rule, self._share = rule, share
        self._level = rule.alpha / max(1, len(rule.ramp)) / 2
        self.all = Evidence(rule, Difference(self._level, share), Bounds(self._level))
        self.newest = Evidence(rule, Difference(self._block(1), share), Bounds(self._block(1)))
        self._score_blocks = self._call_blocks = 1
        self.missed = 0
        """Calls of its conversations that the other side answered, for whatever reason."""
        self.scores: dict[bool, tuple[int, float]] = {True: (0, 0.0), False: (0, 0.0)}
        """Candidate or not -> number of scores, and their sum."""

    def _block(self, number: int) -> float:
        return self._level * 6 / (math.pi * number) ** 2

    def add_score(self, score: float, *, candidate: bool) -> None:
        """Add the score of a conversation."""
        count, total = self.scores[candidate]
        self.scores[candidate] = count + 1, total + score
        if self.newest.difference.count >= self._rule.block:
            self._score_blocks += 1
            self.newest.difference = Difference(self._block(self._score_blocks), self._share)
        for evidence in (self.all, self.newest):
            evidence.difference.add(score, candidate=candidate)

    def add_call(self, *, failed: bool) -> None:
        """Add a call of the candidate's."""
        if self.newest.failures.count >= self._rule.block:
            self._call_blocks += 1
            self.newest.failures = Bounds(self._block(self._call_blocks))
        for evidence in (self.all, self.newest):
            evidence.failures.add(float(failed))

    def verdict(self) -> Verdict | None:
        """Return what has been shown so far; None if nothing."""
        if against := self.newest.against() or self.all.against():
            return Verdict(False, against)
        answers = self.missed < self._rule.failures * (self.all.failures.count + self.missed)
        if answers and (in_favour := self.all.in_favour()):
            return Verdict(True, in_favour)
        return None

    def as_json(self) -> JsonDict:
        """Return the mean scores and the evidence."""
        scores = {
            name: {"count": count, "mean": total / count if count else None}
            for name, (count, total) in (("candidate", self.scores[True]), ("live", self.scores[False]))
        }
        evidence = {"all": self.all.as_json(), "newest": self.newest.as_json()}
        return {"scores": scores, "missed": self.missed, **evidence}
