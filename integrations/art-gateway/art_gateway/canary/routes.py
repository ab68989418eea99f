"""Which conversations a candidate answers: its share of them, what its share was before, and why it changed.

All of it is in the run folder, so that a restart continues: the shares and counts of calls in the store's ``meta``, the
conversations of each side as the splits of their rollouts, their scores where all scores are.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from art_core.errors import StoreError
from art_core.plugin_api import plural
from art_core.types import JsonDict
from art_gateway.canary.trial import Rule, Trial
from art_gateway.text import REMEMBERED

if TYPE_CHECKING:
    from pathlib import Path

    from art_core.store import Store
    from art_gateway.routing import Server

log = logging.getLogger("art_gateway")

META = "routes"
NEW = "it is new"
FOLLOW_SECONDS = 1.0
"""How often new scores are looked for, whoever added them."""
MOST_RESTORED = 20_000
"""Calls that are counted again at a restart, so that it takes less than a second; more would hardly narrow the bounds."""
NEW_SCORES = """
SELECT s.seq, s.rollout_id, r.split, s.reward FROM scores s JOIN rollouts r ON r.rollout_id = s.rollout_id
WHERE s.seq > ? AND r.started >= ? AND r.split IN (?, ?) AND NOT s.aside AND s.reward BETWEEN 0 AND 1 AND NOT EXISTS (
    SELECT 1 FROM scores p
    WHERE p.rollout_id = s.rollout_id AND p.seq < s.seq AND NOT p.aside AND p.reward BETWEEN 0 AND 1
) ORDER BY s.seq
"""
"""A conversation's first score counts, because each may be in the trial once."""


@dataclass(frozen=True)
class Candidate:
    """What may answer in the provider's place."""

    name: str
    upstream: Server
    share: float
    """Of the conversations, from 0 to 1. Only until it is changed, for what is changed outlives a restart."""
    live: str = "live"
    """The name of what answers otherwise."""
    rule: Rule | None = None
    """None: only people change the share."""
    patience: float = 30.0
    """Seconds for its answer, or the next part of a stream, until the provider answers instead."""
    model: str | None = None
    """What its server calls its model."""
    successor: Callable[[Server], Server | None] | None = None
    """Returns the upstream that should replace the given one; None: no other."""

    @property
    def identity(self) -> str:
        """What identifies it: one with another name, address or model starts anew."""
        return " ".join(filter(None, (self.name, self.upstream.base_url, self.model)))


class Routes:
    """The shares, and the trial at the present one."""

    def __init__(self, store: Store, candidate: Candidate) -> None:
        self.candidate = candidate
        self._store = store
        self._unsaved = False
        """Whether calls were counted since the history was last stored."""
        self._history: list[JsonDict] = store.meta(META, [])
        self._answerer: OrderedDict[str, str] = OrderedDict()
        """The newest conversations -> who answers them."""
        mine = "SELECT rollout_id FROM rollouts WHERE split = ? AND started >= ? ORDER BY seq DESC LIMIT ?"
        for (conversation,) in reversed(store.rows(mine, (candidate.name, self._since(), REMEMBERED // 2))):
            self._answerer[conversation] = candidate.name
        self.continues = bool(self._history) and self._history[-1]["candidate"] == candidate.identity
        """Whether its share is what it was when the last gateway of this run folder ended."""
        if self.continues:
            self._begin_trial()
            self._restore_calls()
        else:
            self._record(candidate.share, NEW)

    @property
    def share(self) -> float:
        """The candidate's present share."""
        return self._history[-1]["share"]

    def _since(self) -> float:
        """Return when the present candidate began; conversations from before are the provider's now."""
        began = time.time()
        for change in reversed(self._history):
            if change["candidate"] != self.candidate.identity:
                break
            began = change["at"]
        return began

    def replace(self, upstream: Server, inside: Collection[str]) -> None:
        """Continue with another candidate of the same name, at the first share; at 0 if a person took the share away.

        The provider continues the old candidate's conversations, except those with a call in flight (``inside``).
        """
        last, self.candidate = self._history[-1], replace(self.candidate, upstream=upstream)
        self._answerer = OrderedDict(pair for pair in self._answerer.items() if pair[0] in inside)
        if last.get("by_hand") and not last["share"]:
            self.change(0.0, f"{NEW}, and a person set 0%", by_hand=True)
        else:
            self.change(self.candidate.share, NEW)

    def change(self, share: float, why: str, *, by_hand: bool = False) -> None:
        """Give the candidate another share from now on. The next trial counts only conversations that begin from now on.

        ``by_hand``: a person decided.
        """
        if self._history and (self._history[-1]["candidate"], self.share) == (self.candidate.identity, share):
            return
        self._record(share, why, by_hand)
        # A warning, so that whoever runs the gateway sees it.
        log.warning("%s answers %.4g %% of the conversations: %s", self.candidate.name, 100 * share, why)

    def _record(self, share: float, why: str, by_hand: bool = False) -> None:
        """Add a share to the history, and begin its trial."""
        identity = self.candidate.identity
        counts = {"calls": 0, "failures": 0, "missed": 0}
        change = {"at": time.time(), "share": share, "candidate": identity, "why": why, "by_hand": by_hand}
        self._history.append(change | counts)
        self._save()
        self._begin_trial()

    def answerer(self, conversation: str) -> str:
        """Return the name of the side that a conversation belongs to, as it did from its beginning."""
        if (name := self._answerer.get(conversation)) is None:
            # Of older conversations only the candidate's are remembered.
            known = self._store.has_rollout(conversation)
            name = self.candidate.live if known else self._drawn(conversation)
            self._answerer[conversation] = name
            if len(self._answerer) > REMEMBERED:
                self._answerer.popitem(last=False)
        return name

    def candidate_answers(self, conversation: str) -> bool:
        """Whether the candidate answers a conversation's next call. Once it has no share, it answers none."""
        return self.answerer(conversation) == self.candidate.name and self.share > 0

    def _drawn(self, conversation: str) -> str:
        mine = in_share(f"{self.candidate.name} {conversation}", self.share)
        return self.candidate.name if mine else self.candidate.live

    def answered(self, *, failed: bool) -> None:
        """Count a call of the candidate's, which failed if the other side had to answer it."""
        self._history[-1]["calls"] += 1
        self._history[-1]["failures"] += failed
        self.trial.add_call(failed=failed)
        self._unsaved = True
        self._decide()

    def missed(self) -> None:
        """Count a call of one of the candidate's conversations that the other side answered."""
        self._history[-1]["missed"] += 1
        self.trial.missed += 1
        self._unsaved = True

    async def follow(self) -> None:
        """Take over new scores, and do what the rule says, until cancelled."""
        while True:
            try:
                await self.update()
            except StoreError:
                log.exception("new scores can't be read; trying again")
            await asyncio.sleep(FOLLOW_SECONDS)

    async def update(self) -> None:
        """Take over the scores that are new, and do what the rule says."""
        if self._unsaved:
            self._save()
        trial, values = self.trial, (self._seen, self._history[-1]["at"], self.candidate.name, self.candidate.live)
        for seq, _, split, reward in await asyncio.to_thread(self._store.rows, NEW_SCORES, values):
            if self.trial is not trial:  # the share changed meanwhile
                return
            self._seen = seq
            self.trial.add_score(reward, candidate=split == self.candidate.name)
            self._decide()

    def _decide(self) -> None:
        rule = self.candidate.rule
        verdict = self.trial.verdict() if rule is not None and self.share > 0 else None
        if rule is None or verdict is None:
            return
        share = rule.next_share(self.share) if verdict.passed else 0.0
        if share is not None:
            scored = plural(self.trial.scores[True][0], "score")
            self.change(share, f"{verdict.why} ({scored} of its own)")

    def _begin_trial(self) -> None:
        self.trial = Trial(self.candidate.rule or Rule(()), self.share)
        self._seen = 0
        """The last score that was taken over."""

    def _restore_calls(self) -> None:
        """Count the calls since the share last changed. The failures are spread evenly: their order isn't stored."""
        calls, failures = self._history[-1]["calls"], self._history[-1]["failures"]
        if calls > MOST_RESTORED:
            calls, failures = MOST_RESTORED, failures * MOST_RESTORED // calls
        for number in range(calls):
            self.trial.add_call(failed=(number + 1) * failures // calls > number * failures // calls)
        self.trial.missed = self._history[-1]["missed"]

    def _save(self) -> None:
        self._store.set_meta(META, self._history)
        self._unsaved = False

    def as_json(self) -> JsonDict:
        """Return the shares and the comparison."""
        rule = self.candidate.rule
        return {
            "candidate": self.candidate.name,
            "live": self.candidate.live,
            "share": self.share,
            "next": None if rule is None else rule.next_share(self.share),
            "trial": self.trial.as_json(),
            "history": self._history,
        }


def why_rolled_back(store: Store, checkpoint: Path) -> str | None:
    """Return why the candidate that served a run's ``checkpoint`` lost its share; None if it didn't.

    A candidate that never had a share, because a person had taken it from the one before, didn't lose it.
    """
    changes: list[JsonDict] = store.meta(META, [])
    # By its name, because the gateway may know the run's folder by another path.
    suffix = "/".join(checkpoint.parts[-3:])
    own = [place for place, each in enumerate(changes) if each["candidate"].endswith(suffix)]
    if not own or not own[-1] or changes[own[-1]]["share"]:
        return None
    before, last = changes[own[-1] - 1], changes[own[-1]]
    return last["why"] if before["candidate"] == last["candidate"] and before["share"] else None


def in_share(text: str, share: float) -> bool:
    """Whether a text is among the ``share`` of all texts that its hash draws, always the same ones."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64
