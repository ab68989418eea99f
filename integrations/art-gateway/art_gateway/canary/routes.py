"""Which conversations a candidate answers: its share of them, what its share was before, and why it changed.

All of it is in the run folder, so that a restart changes nothing: the shares in the store's ``meta``, the conversations of each
side as the splits of their rollouts, their scores where all scores are.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from art_core.errors import StoreError
from art_core.types import JsonDict
from art_gateway.canary.trial import Rule, Trial
from art_gateway.text import REMEMBERED

if TYPE_CHECKING:
    from art_core.store import Store
    from art_gateway.routing import Server

log = logging.getLogger("art_gateway")

META = "routes"
FOLLOW_SECONDS = 1.0
"""How often new scores are looked for, whoever added them."""
NEW_SCORES = """
SELECT s.seq, s.rollout_id, r.split, s.reward FROM scores s JOIN rollouts r ON r.rollout_id = s.rollout_id
WHERE s.seq > ? AND r.started >= ? AND r.split IN (?, ?) AND NOT s.aside AND s.reward IS NOT NULL ORDER BY s.seq
"""


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
    patience: float = 60.0
    """Seconds for its answer, or the next part of a stream, until the provider answers instead."""

    @property
    def identity(self) -> str:
        """What identifies it: one with another name or address starts anew."""
        return f"{self.name} {self.upstream.base_url}"


class Routes:
    """The shares, and the trial at the present one."""

    def __init__(self, store: Store, candidate: Candidate) -> None:
        self.candidate = candidate
        self._store = store
        self._history: list[JsonDict] = store.meta(META, [])
        self._answerer: OrderedDict[str, str] = OrderedDict()
        """The newest conversations -> who answers them."""
        if self._history and self._history[-1]["candidate"] == candidate.identity:
            self._begin_trial()
            self._restore_calls()
        else:
            self.change(candidate.share, "it is new")

    @property
    def share(self) -> float:
        """The candidate's present share."""
        return self._history[-1]["share"]

    def change(self, share: float, why: str) -> None:
        """Give the candidate another share from now on. The next trial counts only conversations that begin from now on."""
        self._history.append(
            {"at": time.time(), "share": share, "candidate": self.candidate.identity, "why": why, "failures": 0}
        )
        self._save()
        log.info("%s answers %.4g %% of the conversations: %s", self.candidate.name, 100 * share, why)
        self._begin_trial()

    def answerer(self, conversation: str) -> str:
        """Return the name of the side that a conversation belongs to, as it did from its beginning."""
        if (name := self._answerer.get(conversation)) is None:
            name = self._recorded(conversation) or self._drawn(conversation)
            self._answerer[conversation] = name
            if len(self._answerer) > REMEMBERED:
                self._answerer.popitem(last=False)
        return name

    def candidate_answers(self, conversation: str) -> bool:
        """Whether the candidate answers a conversation's next call. Once it has no share, it answers none."""
        return self.answerer(conversation) == self.candidate.name and self.share > 0

    def _recorded(self, conversation: str) -> str | None:
        if not self._store.has_rollout(conversation):
            return None
        [(split,)] = self._store.rows("SELECT split FROM rollouts WHERE rollout_id = ?", (conversation,))
        return split if split == self.candidate.name else self.candidate.live

    def _drawn(self, conversation: str) -> str:
        drawn = f"{self.candidate.name} {conversation}".encode("utf-8", "surrogatepass")
        mine = int.from_bytes(hashlib.blake2b(drawn, digest_size=8).digest()) < self.share * 2**64
        return self.candidate.name if mine else self.candidate.live

    def answered(self, *, failed: bool) -> None:
        """Count a call of the candidate's, which failed if the other side then answered it."""
        self.trial.add_call(failed=failed)
        if failed:
            self._history[-1]["failures"] += 1
            self._save()
        self._decide()

    async def follow(self) -> None:
        """Take over new scores, and do what the rule says, until cancelled."""
        while True:
            try:
                await self.update()
            except StoreError:
                log.exception("new scores can't be read; trying again")
            await asyncio.sleep(FOLLOW_SECONDS)

    async def update(self) -> None:
        """Take over the scores that are new, and do what the rule says.

        A conversation's first score counts, because each may be in the trial once.
        """
        values = (self._seen, self._history[-1]["at"], self.candidate.name, self.candidate.live)
        for seq, conversation, split, reward in await asyncio.to_thread(self._store.rows, NEW_SCORES, values):
            self._seen = seq
            if conversation in self._scored or not 0 <= reward <= 1:
                continue
            self._scored.add(conversation)
            self.trial.add_score(reward, candidate=split == self.candidate.name)
            if self._decide():
                return

    def _decide(self) -> bool:
        """Do what the rule says, and return whether that changed the share."""
        rule = self.candidate.rule
        verdict = self.trial.verdict() if rule is not None and self.share > 0 else None
        if rule is None or verdict is None:
            return False
        share = rule.next_share(self.share) if verdict.passed else 0.0
        if share is None:
            return False
        self.change(share, verdict.why)
        return True

    def _begin_trial(self) -> None:
        self.trial = Trial(self.candidate.rule or Rule(()))
        self._seen = 0
        """The last score that was taken over."""
        self._scored: set[str] = set()

    def _restore_calls(self) -> None:
        """Count the candidate's calls since its share last changed. The failures are spread evenly: their order isn't known."""
        stage = self._history[-1]
        [(answered,)] = self._store.rows(
            "SELECT count(*) FROM calls c JOIN rollouts r ON r.rollout_id = c.rollout_id "
            "WHERE r.started >= ? AND r.split = ? AND c.policy_version >= 0 AND c.finish_reason != 'aborted'",
            (stage["at"], self.candidate.name),
        )
        failed = stage["failures"]
        calls = answered + failed
        for number in range(calls):
            self.trial.add_call(failed=(number + 1) * failed // calls > number * failed // calls)

    def _save(self) -> None:
        self._store.set_meta(META, self._history)

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
