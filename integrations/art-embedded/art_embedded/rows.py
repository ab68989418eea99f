"""Which tokens each row of the cache holds, and which row a new request gets. Knows nothing about models or text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from art_embedded.kv import KeyValues

WORTH_WAITING = 16
"""Prompt tokens that another request is computing right now and that are worth one step's wait to be copied."""
WORTH_LOSING = 16
"""Tokens at the end of a row's history that may be overwritten rather than have the front part copied elsewhere."""
KEPT_SHARE = 0.5
"""Of the budget: rows are added for the sake of what idle ones hold up to this share; beyond it the idle row that was used
least recently is taken, and rows are added only where none is idle."""
SMALLEST_CAPACITY = 256


class Occupant(Protocol):
    """What a row is in use for."""

    row: int
    """Kept up to date when rows change places."""


@dataclass
class Match:
    """How much of a prompt is there already."""

    row: int
    stored: int
    """Tokens whose keys and values ``row`` holds."""
    promised: int
    """Tokens that some row holds or will hold when its own prompt is computed."""


@dataclass
class Rows:
    """The table beside the cache's tensors, one line per row, and the rules by which rows are reused and given up."""

    kv: KeyValues
    budget: int
    """Bytes that all rows together may take."""
    most: int
    """Rows at most."""
    count: int = 0
    capacity: int = 0
    """Tokens that fit into a row; the same for all."""
    history: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    """(count, capacity): the tokens that are stored, and those of the prompt that will be."""
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """(count,): tokens stored."""
    claimed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """(count,): tokens of ``history`` that are stored or will be."""
    used: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """(count,): when a row was last taken or given back, on a clock that counts these events."""
    occupants: list[Occupant | None] = field(default_factory=list)
    clock: int = 0

    def place(self, occupant: Occupant, prompt: np.ndarray, longest: int) -> bool:
        """Give ``occupant`` a row with as much of ``prompt`` (tokens,) in it as any row has.

        ``longest`` is the length that the row may grow to. False: there is no room now, or waiting a step saves work.
        """
        if not self._fit(longest):
            return False
        match = self.match(prompt)
        if self.kv.shares_prefixes and match.promised >= match.stored + WORTH_WAITING:
            return False
        row = self._row_for(match)
        if row is None:
            return False
        if match.stored and row != match.row:
            self.kv.copy(match.row, row, match.stored)
        self.history[row, : len(prompt)] = prompt
        self.lengths[row], self.claimed[row] = match.stored, len(prompt)
        self._touch(row, occupant)
        return True

    def release(self, occupant: Occupant) -> None:
        """Take the row back; what is stored in it stays for the next prompt that begins so."""
        row = occupant.row
        self.claimed[row] = self.lengths[row]
        self._touch(row, None)
        occupant.row = -1

    def _touch(self, row: int, occupant: Occupant | None) -> None:
        self.clock += 1
        self.used[row] = self.clock
        self.occupants[row] = occupant
        if occupant is not None:
            occupant.row = row

    def match(self, prompt: np.ndarray) -> Match:
        """Find the row that shares most with ``prompt``; the last token is never shared, its logits are needed."""
        width = min(len(prompt) - 1, self.capacity)
        if not self.count or not width:
            return Match(row=0, stored=0, promised=0)
        differs = self.history[:, :width] != prompt[:width]
        common = np.where(differs.any(1), differs.argmax(1), width)
        stored = np.minimum(common, self.lengths)
        if not self.kv.shares_prefixes:
            stored = np.where(stored == self.lengths, stored, 0)
        whole = stored == self.lengths
        idle = np.array([occupant is None for occupant in self.occupants])
        row = int((stored * 4 + idle * 2 + whole).argmax())
        return Match(row, int(stored[row]), int(np.minimum(common, self.claimed).max()))

    def _row_for(self, match: Match) -> int | None:
        if self.occupants[match.row] is None and self.lengths[match.row] - match.stored <= WORTH_LOSING:
            return match.row
        idle = [row for row, occupant in enumerate(self.occupants) if occupant is None]
        empty = [row for row in idle if not self.lengths[row]]
        if empty:
            return empty[0]
        limit = self._limit(self.capacity, share=KEPT_SHARE if idle else 1.0)
        if self.count < limit:
            self._resize(min(limit, 2 * self.count), self.capacity)
            return self._row_for(match)
        return min(idle, key=lambda row: self.used[row], default=None)

    def _limit(self, capacity: int, share: float = 1.0) -> int:
        return max(1, min(self.most, int(share * self.budget) // (capacity * self.kv.token_bytes)))

    def _fit(self, length: int) -> bool:
        """Make rows long enough for ``length`` tokens; False where that must wait until fewer rows are in use."""
        capacity = max(self.capacity, SMALLEST_CAPACITY)
        while capacity < length:
            capacity *= 2
        busy = sum(occupant is not None for occupant in self.occupants)
        limit = self._limit(capacity)
        if busy and busy >= limit:
            return False
        if capacity > self.capacity:
            self.pack([occupant for occupant in self.occupants if occupant is not None])
            self._resize(min(limit, max(self.count, 8)), capacity)
        return True

    def _resize(self, count: int, capacity: int) -> None:
        kept, width = min(count, self.count), min(capacity, self.capacity)
        for name in ("lengths", "claimed", "used"):
            column = np.zeros(count, np.int64)
            column[:kept] = getattr(self, name)[:kept]
            setattr(self, name, column)
        history = np.zeros((count, capacity), np.int32)
        history[:kept, :width] = self.history[:kept, :width]
        self.history = history
        self.occupants = [*self.occupants[:kept], *[None] * (count - kept)]
        self.count, self.capacity = count, capacity
        self.kv.resize(count, capacity)

    def pack(self, front: list[Occupant]) -> None:
        """Move the rows of ``front`` to the places 0 to ``len(front) - 1``, in any order."""
        members = {id(occupant) for occupant in front}
        holes = [row for row in range(len(front)) if id(self.occupants[row]) not in members]
        outside = [occupant.row for occupant in front if occupant.row >= len(front)]
        for hole, row in zip(holes, outside, strict=True):
            self._swap(hole, row)

    def _swap(self, a: int, b: int) -> None:
        self.kv.swap(a, b, (int(self.lengths[a]), int(self.lengths[b])))
        for column in (self.history, self.lengths, self.claimed, self.used):
            column[[a, b]] = column[[b, a]]
        self.occupants[a], self.occupants[b] = self.occupants[b], self.occupants[a]
        for row in (a, b):
            occupant = self.occupants[row]
            if occupant is not None:
                occupant.row = row

    def clear(self) -> None:
        """Forget everything stored: the weights have changed."""
        self.lengths[:] = 0
        self.claimed[:] = 0
