"""Lets calls through: all at once, so many at a time, or none while weights change. Knows nothing about what a call is."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from art_core.errors import UpstreamError


class Gate:
    """``async with gate:`` around a call; ``async with gate.held():`` runs when no call is inside and none can enter.

    ``limit`` calls are inside at a time, the others wait in the order in which they came; where ``queue`` of them wait, the
    next one is refused (429). None: no limit.
    """

    def __init__(self, limit: int | None = None, queue: int | None = None) -> None:
        self._limit = float("inf") if limit is None else limit
        self._queue = float("inf") if queue is None else queue
        self._holders = 0
        self._paused = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._empty = asyncio.Event()
        self.inside = 0
        """Calls that are being answered."""

    @property
    def waiting(self) -> int:
        """Calls that have come and may not enter yet."""
        return len(self._waiting)

    @property
    def paused(self) -> bool:
        """Whether ``pause`` holds new calls."""
        return self._paused

    async def __aenter__(self) -> None:
        if not self._holders and not self._waiting and self.inside < self._limit:
            self.inside += 1
            return
        if len(self._waiting) >= self._queue:
            raise UpstreamError(
                f"{self.inside} calls are being answered here and {len(self._waiting)} wait, which is the most that may; try "
                "again later, run fewer agents at a time, or raise the limits",
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
                self._leave()
            else:
                # It may have been passed over already.
                with suppress(ValueError):
                    self._waiting.remove(turn)
            raise

    async def __aexit__(self, *exc_info: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self.inside -= 1
        self._let_in()

    def _let_in(self) -> None:
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
        """Hold new calls and wait until those inside have left. Several may hold at once."""
        self._holders += 1
        try:
            await self._emptied()
            yield
        finally:
            self._holders -= 1
            self._let_in()

    async def pause(self) -> None:
        """Hold new calls until ``resume``; return when none is inside. A second pause changes nothing."""
        if not self._paused:
            self._paused = True
            self._holders += 1
        await self._emptied()

    async def resume(self) -> None:
        """Undo ``pause``; calls still wait for others who hold them."""
        if self._paused:
            self._paused = False
            self._holders -= 1
            self._let_in()
