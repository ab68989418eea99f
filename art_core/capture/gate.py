"""Lets calls through, or holds them while weights change. Knows nothing about what a call is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """``async with gate:`` around a call; ``async with gate.held():`` runs when no call is inside and none can enter."""

    def __init__(self) -> None:
        self._inside = 0
        self._holders = 0
        self._paused = False
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> None:
        if self._holders:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._holders)
                self._inside += 1
        else:
            self._inside += 1

    async def __aexit__(self, *exc_info: object) -> None:
        self._inside -= 1
        if self._holders and not self._inside:
            # Shielded: the call that leaves may itself be cancelled, and whoever waits for it must still hear.
            await asyncio.shield(self._tell())

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold new calls and wait until those inside have left. Several may hold at once."""
        self._holders += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._inside)
            yield
        finally:
            self._holders -= 1
            await asyncio.shield(self._tell())

    async def pause(self) -> None:
        """Hold new calls until ``resume``; return when none is inside. A second pause changes nothing."""
        if not self._paused:
            self._paused = True
            self._holders += 1
        async with self._changed:
            await self._changed.wait_for(lambda: not self._inside)

    async def resume(self) -> None:
        """Undo ``pause``; calls still wait for others who hold them."""
        if self._paused:
            self._paused = False
            self._holders -= 1
            await self._tell()
