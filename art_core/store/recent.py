"""What the writer of calls remembers of those it wrote last, so that most calls need one statement. Bounded in memory."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

CANDIDATES = 8
"""Calls of a rollout that are tried as parents: enough for a few sub-agents taking turns."""
TOKENS_REMEMBERED = 20_000_000
"""Limit over all rollouts of the tokens of possible parents; 4 bytes each."""
ROLLOUTS_REMEMBERED = 4096
REFERENCES_REMEMBERED = 10_000
"""Row ids of messages, and of blobs, per generation; two generations are kept."""
SHORTEST_SHARED = 16
"""Tokens; a shorter common start is not worth a parent in another rollout."""

Key = TypeVar("Key")


@dataclass(frozen=True, eq=False)
class WrittenCall:
    """A call that another one may extend."""

    seq: int
    tokens: np.ndarray
    """Prompt and sampled ids, int32."""

    def shared(self, prompt: np.ndarray) -> int:
        """Return the number of tokens at the start that the call and a prompt have in common."""
        length = min(len(self.tokens), len(prompt))
        if not length or self.tokens[0] != prompt[0]:
            return 0
        differ = self.tokens[:length] != prompt[:length]
        place = int(differ.argmax())
        return place if differ[place] else length


@dataclass
class RolloutTail:
    """A rollout as its next call needs it."""

    digest: bytes | None = None
    """Of its last call; None before the first."""
    calls: list[WrittenCall] = field(default_factory=list)


class Recent:
    """The rollouts that made calls most recently."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, RolloutTail] = OrderedDict()
        self._roots: deque[WrittenCall] = deque(maxlen=CANDIDATES)
        """Calls without a parent: a chain then never leads through more than one other rollout."""
        self._tokens = 0

    def line(self, rollout_id: str) -> RolloutTail | None:
        """Return what is remembered of a rollout."""
        return self._lines.get(rollout_id)

    def parent(self, line: RolloutTail, prompt: np.ndarray) -> tuple[WrittenCall | None, int]:
        """Return the call that shares most tokens with a prompt, the newest of equals, and their number."""
        parent, longest = None, 0
        for call in reversed(line.calls):
            if (shared := call.shared(prompt)) > longest:
                parent, longest = call, shared
        if parent is None:
            for call in self._roots:
                if (shared := call.shared(prompt)) > max(longest, SHORTEST_SHARED):
                    parent, longest = call, shared
        return parent, longest

    def add(
        self, rollout_id: str, line: RolloutTail, call: WrittenCall, parent: WrittenCall | None, shared: int
    ) -> None:
        """Remember a rollout's newest call, which shares that many tokens with its parent."""
        if rollout_id not in self._lines:
            self._lines[rollout_id] = line
            self._tokens += sum(len(call.tokens) for call in line.calls)
        self._lines.move_to_end(rollout_id)
        if parent is None:
            self._roots.append(call)
        elif shared == len(parent.tokens) and parent in line.calls:
            # Whatever shares tokens with the parent shares them with this call, which begins with all of them.
            line.calls.remove(parent)
            self._tokens -= len(parent.tokens)
        line.calls.append(call)
        self._tokens += len(call.tokens)
        if len(line.calls) > CANDIDATES:
            self._tokens -= len(line.calls.pop(0).tokens)
        while (self._tokens > TOKENS_REMEMBERED or len(self._lines) > ROLLOUTS_REMEMBERED) and len(self._lines) > 1:
            _, oldest = self._lines.popitem(last=False)
            self._tokens -= sum(len(call.tokens) for call in oldest.calls)


class References(Generic[Key]):
    """Row ids by what the rows hold. The least recently used half is forgotten at once."""

    def __init__(self) -> None:
        self._newer: dict[Key, int] = {}
        self._older: dict[Key, int] = {}

    def get(self, key: Key) -> int | None:
        """Return the row's id, None if it is not remembered."""
        row = self._newer.get(key)
        if row is None and (row := self._older.get(key)) is not None:
            self.put(key, row)
        return row

    def put(self, key: Key, row: int) -> int:
        """Remember a row's id, and return it."""
        self._newer[key] = row
        if len(self._newer) >= REFERENCES_REMEMBERED:
            self._newer, self._older = {}, self._newer
        return row
