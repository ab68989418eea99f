"""One version of the weights of an engine that serves several."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from art_core.types import JsonDict


class ServesVersions(Protocol):
    """An engine that answers with the weights of a version."""

    async def answer(self, request: JsonDict, version: int) -> JsonDict: ...

    def chunks(self, request: JsonDict, version: int) -> AsyncIterator[JsonDict]: ...


@dataclass(frozen=True)
class Version:
    """One served version as an ``Upstream``."""

    engine: ServesVersions
    version: int

    async def chat(self, request: JsonDict) -> JsonDict:
        return await self.engine.answer(request, self.version)

    def stream(self, request: JsonDict) -> AsyncIterator[JsonDict]:
        return self.engine.chunks(request, self.version)
