"""Tracks which tokens each row of the cache holds, and assigns rows to requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from art_embedded.kv import KeyValues
from art_embedded.shared_prefixes import Shared, find_shared

WORTH_WAITING = 16
"""Prompt tokens that justify waiting one step, so that they can be copied from a request that is computing them."""
WORTH_LOSING = 16
"""Tokens at the end of a row's history that may be overwritten, to avoid copying the front part elsewhere."""
KEPT_SHARE = 0.5
"""Share of the budget up to which rows are added so that idle ones keep their content. Beyond it, the least recently used idle
row is reused, and rows are added only if none is idle."""
SMALLEST_CAPACITY = 256


class Occupant(Protocol):
    """The user of a row."""

    row: int
    """Updated when rows are swapped."""


@dataclass
class Match:
    """How much of a prompt the cache already holds."""

    row: int
    stored: int
    """Tokens whose keys and values ``row`` holds."""
    promised: int
    """Tokens that some row holds or will hold once its own prompt is computed."""


@dataclass
class Rows:
    """The state of the cache's rows, and the rules for reusing and evicting them."""

    kv: KeyValues
    budget: int
    """Bytes that all rows together may use."""
    most: int
    """Largest number of rows."""
    count: int = 0
    capacity: int = 0
    """Tokens per row, the same for all."""
    history: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    """(count, capacity): the stored tokens, followed by those of the prompt that will be stored."""
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """(count,): stored tokens."""
    claimed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """(count,): valid tokens in ``history``, stored or not yet."""
    marks: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """(count,): where a prompt's state is kept besides that of the row's end, for models whose states can't be truncated; from
    ``lengths`` on it is still to be computed, 0 is none."""
    used: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """(count,): when the row was last assigned or released, in ticks of ``clock``, which counts these events."""
    occupants: list[Occupant | None] = field(default_factory=list)
    clock: int = 0
    longest: int = 0
    """Tokens of the longest row asked for since the last ``clear``."""
    _shared: tuple[tuple[int, int], list[Shared]] = ((0, 0), [])
    """Of which clock and number of rows, and which prefixes they share."""

    def place(self, occupant: Occupant, prompt: np.ndarray) -> bool:
        """Assign ``occupant`` a row that holds as much of ``prompt`` (tokens,) as any row does; call ``fit`` first.

        Returns False if no row is free, or if waiting a step saves work.
        """
        match = self.match(prompt)
        if match.promised >= match.stored + WORTH_WAITING:
            return False
        row = self._row_for(match)
        if row is None:
            return False
        cuts_state = not self.kv.shares_prefixes and match.stored < self.lengths[match.row]
        if match.stored and (row != match.row or cuts_state):
            self.kv.copy(match.row, row, match.stored)
        mark = int(self.marks[match.row])
        self.marks[row] = mark if mark <= match.stored else 0
        if not self.kv.shares_prefixes and len(prompt) - 1 >= match.stored + WORTH_WAITING:
            self.marks[row] = len(prompt) - 1
        self.history[row, : len(prompt)] = prompt
        self.lengths[row], self.claimed[row] = match.stored, len(prompt)
        self._touch(row, occupant)
        return True

    def store(self, row: int, tokens: int) -> None:
        """Note that so many more tokens of a row are stored."""
        self.lengths[row] += tokens
        if not self.kv.shares_prefixes and self.lengths[row] == self.marks[row]:
            self.kv.mark(row)

    def release(self, occupant: Occupant) -> None:
        """Free the row; its content stays for the next prompt with the same beginning."""
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
        """Find the row that shares most with ``prompt``. The last token is never shared, because its logits are needed."""
        width = min(len(prompt) - 1, self.capacity)
        if not self.count or not width:
            return Match(row=0, stored=0, promised=0)
        differs = self.history[:, :width] != prompt[:width]
        common = np.where(differs.any(1), differs.argmax(1), width)
        stored, promised = np.minimum(common, self.lengths), np.minimum(common, self.claimed)
        if not self.kv.shares_prefixes:
            promised = np.where((self.marks <= common) & (self.marks <= self.claimed), self.marks, 0)
            stored = np.where(common >= self.lengths, self.lengths, np.where(self.marks <= self.lengths, promised, 0))
        whole = stored == self.lengths
        idle = np.array([occupant is None for occupant in self.occupants])
        row = int((stored * 4 + idle * 2 + whole).argmax())
        return Match(row, int(stored[row]), int(promised.max()))

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

    def fit(self, length: int) -> bool:
        """Make rows long enough for ``length`` tokens; return False if too many rows are in use for that."""
        self.longest = max(self.longest, length)
        capacity = max(self.capacity, _capacity(length))
        busy = sum(occupant is not None for occupant in self.occupants)
        limit = self._limit(capacity)
        if busy and busy >= limit:
            return False
        if capacity > self.capacity:
            self.pack([occupant for occupant in self.occupants if occupant is not None])
            self._resize(min(limit, max(self.count, 8)), capacity)
        return True

    def _resize(self, count: int, capacity: int) -> None:
        rows, width = min(count, self.count), min(capacity, self.capacity)
        for name in ("lengths", "claimed", "marks", "used"):
            column = np.zeros(count, np.int64)
            column[:rows] = getattr(self, name)[:rows]
            setattr(self, name, column)
        history = np.zeros((count, capacity), np.int32)
        history[:rows, :width] = self.history[:rows, :width]
        self.history = history
        self.occupants = [*self.occupants[:rows], *[None] * (count - rows)]
        self.count, self.capacity = count, capacity
        self.kv.resize(count, capacity)

    def pack(self, front: list[Occupant]) -> None:
        """Move the rows of ``front`` to indices 0 to ``len(front) - 1``, in any order."""
        members = {id(occupant) for occupant in front}
        holes = [row for row in range(len(front)) if id(self.occupants[row]) not in members]
        outside = [occupant.row for occupant in front if occupant.row >= len(front)]
        for hole, row in zip(holes, outside, strict=True):
            self._swap(hole, row)

    def shared(self, count: int) -> list[Shared]:
        """Return the prefixes that the first ``count`` rows have in common, as of when a row was last assigned or released."""
        if not self.kv.reads_prefixes_once:
            return []
        if self._shared[0] != (self.clock, count):
            found = find_shared(self.history[:count], self.lengths[:count]) if count else []
            self._shared = (self.clock, count), found
        return self._shared[1]

    def _swap(self, a: int, b: int) -> None:
        self.kv.swap(a, b, (int(self.lengths[a]), int(self.lengths[b])))
        for column in (self.history, self.lengths, self.claimed, self.marks, self.used):
            column[[a, b]] = column[[b, a]]
        self.occupants[a], self.occupants[b] = self.occupants[b], self.occupants[a]
        for row in (a, b):
            occupant = self.occupants[row]
            if occupant is not None:
                occupant.row = row

    def clear(self) -> None:
        """Drop everything stored, because the weights have changed.

        Rows become as short as the requests since the last time allow, because long ones leave room for fewer.
        """
        self.lengths[:] = 0
        self.claimed[:] = 0
        self.marks[:] = 0
        if self.count and not any(self.occupants) and _capacity(self.longest) < self.capacity:
            self._resize(self.count, _capacity(self.longest))
        self.longest = 0


def _capacity(length: int) -> int:
    """Return the tokens per row for rows of up to ``length`` tokens."""
    return max(SMALLEST_CAPACITY, 1 << (length - 1).bit_length())
