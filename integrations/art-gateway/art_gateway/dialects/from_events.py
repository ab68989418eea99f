"""An API's answer out of the events of its stream: a whole completion is a stream of one chunk. Knows no wire format."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from typing import Generic, Protocol, TypeVar

from art_core.capture import Dialect
from art_core.types import JsonDict
from art_gateway.dialects.reading import event


class Events(Protocol):
    """One answer: ``add`` every chunk, then ``end``; each returns the events to send."""

    def add(self, chunk: JsonDict) -> list[JsonDict]: ...

    def end(self) -> list[JsonDict]: ...

    def whole(self) -> JsonDict:
        """Return the answer so far as one object."""
        ...


E = TypeVar("E", bound=Events)


class FromEvents(Dialect, Generic[E]):
    """The half of a dialect that answers."""

    def _begin(self, body: JsonDict) -> E:
        """Return the events of the answer to ``body``."""
        raise NotImplementedError

    def _keep(self, body: JsonDict, events: E) -> None:
        """Remember what later requests need, before the client has the end of the answer."""
        raise NotImplementedError

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict:
        """Return the answer as one object."""
        events = self._begin(body)
        events.add(completion)
        events.end()
        self._keep(body, events)
        return events.whole()

    async def stream_from_chat(self, body: JsonDict, chunks: AsyncIterable[JsonDict]) -> AsyncGenerator[bytes]:
        """Yield the events of the answer as they come."""
        events = self._begin(body)
        async for chunk in chunks:
            for one in events.add(chunk):
                yield event(one)
        last = events.end()
        self._keep(body, events)
        for one in last:
            yield event(one)
