"""As many at a time as a number that changes: the free places of all connected workers. Knows nothing about workers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Gate:
    """``async with gate`` waits for one of ``capacity()`` places, first come, first served."""

    def __init__(self, capacity: Callable[[], int]) -> None:
        self._capacity = capacity
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait for a place."""
        return sum(not place.done() for place in self._waiting)

    def admit(self) -> None:
        """Let in whoever has a place now. To be called whenever the capacity has grown."""
        if not self._waiting:
            return
        capacity = self._capacity()  # once: with a thousand workers it is a sum of a thousand
        while self._waiting and self._taken < capacity:
            place = self._waiting.popleft()
            if not place.done():
                self._taken += 1
                place.set_result(None)

    async def __aenter__(self) -> None:
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        if len(self._waiting) == 1:  # else there was no place for those before
            self.admit()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._taken -= 1
        self.admit()
