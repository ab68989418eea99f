"""Which calls may be answered now, and which are in flight."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from art_core.errors import UpstreamError


class Gate:
    """``async with gate:`` wraps a call; ``async with gate.held():`` runs its block while no call is inside.

    At most ``limit`` calls are inside, and others wait in order of arrival. If ``queue`` calls are waiting, the next
    one is refused (429). None: no limit.
    """

    def __init__(self, limit: int | None = None, queue: int | None = None) -> None:
        self._limit = float("inf") if limit is None else limit
        self._queue = float("inf") if queue is None else queue
        self._holders = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._empty = asyncio.Event()
        self.paused = False
        """Whether ``pause`` holds new calls."""
        self.inside = 0
        """How many calls are being answered."""

    @property
    def waiting(self) -> int:
        """How many calls are waiting."""
        return len(self._waiting)

    async def __aenter__(self) -> None:
        if not self._holders and not self._waiting and self.inside < self._limit:
            self.inside += 1
            return
        if len(self._waiting) >= self._queue:
            raise UpstreamError(
                f"{self.inside} calls are being answered and {len(self._waiting)} are waiting, which is the limit; "
                "retry later, run fewer agents at a time, or raise the limits",
                status=429,
                code="too_many_calls",
                retry_after=1.0,
            )
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                await self.__aexit__()
            else:
                # ``_admit`` may have removed it already.
                with suppress(ValueError):
                    self._waiting.remove(turn)
            raise

    async def __aexit__(self, *exc_info: object) -> None:
        self.inside -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and not self._holders and self.inside < self._limit:
            turn = self._waiting.popleft()
            if not turn.cancelled():
                self.inside += 1
                turn.set_result(None)
        if not self.inside:
            self._empty.set()

    async def _emptied(self) -> None:
        while self.inside:
            self._empty.clear()
            await self._empty.wait()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold new calls, and run the block once those inside have ended. Several blocks may hold calls at once."""
        self._holders += 1
        try:
            await self._emptied()
            yield
        finally:
            self._holders -= 1
            self._admit()

    async def pause(self) -> None:
        """Hold new calls until ``resume``, and return when none is inside. A second pause changes nothing."""
        if not self.paused:
            self.paused = True
            self._holders += 1
        await self._emptied()

    async def resume(self) -> None:
        """Undo ``pause``; ``held`` may still hold calls."""
        if self.paused:
            self.paused = False
            self._holders -= 1
            self._admit()


@dataclass(frozen=True)
class CallsSnapshot:
    """The state of all calls at one moment."""

    quiet: float
    """Seconds since a call ended or sent a chunk."""
    waiting: int
    """Calls that the gate holds."""
    rollouts: dict[str, tuple[int, float | None]]
    """By rollout id: how many calls have ended, and the age of the oldest open one in seconds (None: none is open)."""


@dataclass
class _Calls:
    ended: int = 0
    began: list[float] = field(default_factory=list)
    """When each open call began (``time.monotonic``), oldest first."""


class CallActivity:
    """Counts the calls of every rollout, so that the watchdog can see why nothing ends."""

    def __init__(self) -> None:
        self._moved = time.monotonic()
        self._rollouts: dict[str, _Calls] = {}

    @contextmanager
    def call(self, rollout_id: str) -> Iterator[None]:
        """Count a call of this rollout as open while the block runs."""
        calls, began = self._rollouts.setdefault(rollout_id, _Calls()), time.monotonic()
        calls.began.append(began)
        try:
            yield
        finally:
            calls.began.remove(began)
            calls.ended += 1
            self.note_progress()

    def note_progress(self) -> None:
        """Note that an answer made progress."""
        self._moved = time.monotonic()

    def forget(self, rollout_id: str) -> None:
        """Drop a closed rollout."""
        self._rollouts.pop(rollout_id, None)

    def snapshot(self, gate: Gate) -> CallsSnapshot:
        """Return the state of all calls now. ``gate`` is the one that admits them."""
        now = time.monotonic()
        rollouts = {
            name: (calls.ended, now - calls.began[0] if calls.began else None) for name, calls in self._rollouts.items()
        }
        return CallsSnapshot(now - self._moved, gate.waiting, rollouts)
