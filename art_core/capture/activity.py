"""What the calls at one door do: how many were answered, which are on their way since when. Knows nothing about who asks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from art_core.capture.admission import Gate


@dataclass
class Calls:
    """Of one rollout."""

    ended: int = 0
    began: dict[object, float] = field(default_factory=dict)
    """Of those on their way, by the process's own clock."""

    @property
    def longest(self) -> float | None:
        """Seconds that the oldest of those on their way has taken; None where there is none."""
        return time.monotonic() - min(self.began.values()) if self.began else None


@dataclass(frozen=True)
class Look:
    """All calls as of one moment."""

    quiet: float
    """Seconds since one ended, or sent a chunk."""
    waiting: int
    """Calls that are held back."""
    rollouts: dict[str, tuple[int, float | None]]
    """Calls that ended, and the seconds that the longest on its way has taken, by rollout."""


class Activity:
    """Told of every call; looked at by whoever wants to know why nothing ends."""

    def __init__(self) -> None:
        self._moved = time.monotonic()
        self._rollouts: dict[str, Calls] = {}

    @contextmanager
    def call(self, rollout_id: str) -> Iterator[None]:
        """A call of this rollout is on its way while the block runs."""
        calls, key = self._rollouts.setdefault(rollout_id, Calls()), object()
        calls.began[key] = time.monotonic()
        try:
            yield
        finally:
            del calls.began[key]
            calls.ended += 1
            self.moved()

    def moved(self) -> None:
        """Note that an answer has come on."""
        self._moved = time.monotonic()

    def forget(self, rollout_id: str) -> None:
        """Note that a rollout is closed."""
        self._rollouts.pop(rollout_id, None)

    def look(self, gate: Gate) -> Look:
        """Return what the calls do now; ``gate`` is what lets them through."""
        rollouts = {name: (calls.ended, calls.longest) for name, calls in self._rollouts.items()}
        return Look(time.monotonic() - self._moved, gate.waiting, rollouts)
