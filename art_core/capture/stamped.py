"""An engine whose answers carry a version that it does not choose itself. Knows nothing about who sets it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from art_core.types import Engine, JsonDict


class Stamped:
    """Answers as ``engine`` does, with ``policy_version`` in place of what it says itself."""

    def __init__(self, engine: Engine, policy_version: int) -> None:
        self._engine = engine
        self.policy_version = policy_version

    async def start(self) -> None:
        await self._engine.start()

    async def stop(self) -> None:
        await self._engine.stop()

    async def chat(self, request: JsonDict) -> JsonDict:
        return {**await self._engine.chat(request), "policy_version": self.policy_version}

    async def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        async with aclosing(self._engine.stream(request)) as chunks:
            async for chunk in chunks:
                yield {**chunk, "policy_version": self.policy_version}
