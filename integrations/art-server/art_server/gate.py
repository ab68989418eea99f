"""Limits concurrency to a number that changes: the capacity of all connected workers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Gate:
    """``async with gate`` waits for one of ``capacity()`` slots, first come, first served."""

    def __init__(self, capacity: Callable[[], int]) -> None:
        self._capacity = capacity
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """The number of tasks that wait for a slot."""
        return sum(not slot.done() for slot in self._waiting)

    def admit(self) -> None:
        """Admit waiting tasks up to the capacity. Must be called whenever the capacity has grown."""
        if not self._waiting:
            return
        capacity = self._capacity()  # only once: it is a sum over all workers
        while self._waiting and self._taken < capacity:
            slot = self._waiting.popleft()
            if not slot.done():
                self._taken += 1
                slot.set_result(None)

    async def __aenter__(self) -> None:
        slot = asyncio.get_running_loop().create_future()
        self._waiting.append(slot)
        if len(self._waiting) == 1:  # otherwise earlier tasks already wait, so no slot is free
            self.admit()
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                await self.__aexit__()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._taken -= 1
        self.admit()
