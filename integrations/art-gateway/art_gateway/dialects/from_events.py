"""Builds an API's answers from the events of its stream; a whole completion counts as a stream of one chunk."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from typing import Generic, Protocol, TypeVar

from art_core.capture import Dialect, merge_delta
from art_core.types import JsonDict
from art_gateway.dialects.reading import event


class Events(Protocol):
    """One answer: call ``add`` with every chunk, then ``end``; each returns the events to send."""

    def add(self, chunk: JsonDict) -> list[JsonDict]: ...

    def end(self) -> list[JsonDict]: ...

    def snapshot(self) -> JsonDict:
        """Return the answer so far as one object."""
        ...


E = TypeVar("E", bound=Events)


class FromEvents(Dialect, Generic[E]):
    """The answering half of a dialect."""

    def _begin(self, body: JsonDict) -> E:
        """Return an empty answer to ``body``."""
        raise NotImplementedError

    def _remember(self, body: JsonDict, events: E) -> None:
        """Store what later requests need, before the client has the end of the answer."""

    def _framed(self, part: JsonDict) -> bytes:
        """Return an event as it is sent."""
        return event(part)

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict:
        """Return the answer as one object."""
        events = self._begin(body)
        events.add(completion)
        events.end()
        self._remember(body, events)
        return events.snapshot()

    def error_event(self, message: str, status: int, code: str | None) -> bytes:
        """Return the event for a stream that has failed."""
        return self._framed(self.error(message, status, code))

    async def stream_from_chat(self, body: JsonDict, chunks: AsyncIterable[JsonDict]) -> AsyncGenerator[bytes]:
        """Yield the events of the answer as chunks arrive."""
        events = self._begin(body)
        async for chunk in chunks:
            for each in events.add(chunk):
                yield self._framed(each)
        last = events.end()
        self._remember(body, events)
        for each in last:
            yield self._framed(each)


def grow(message: JsonDict, choice: JsonDict) -> JsonDict:
    """Add a choice of a completion or chunk to its message, and return what it adds."""
    if choice.get("message"):
        message.update(choice["message"])
    else:
        merge_delta(message, choice.get("delta") or {})
    return choice.get("message") or choice.get("delta") or {}


def text_in(delta: JsonDict) -> str:
    """Return the text of a message or delta."""
    return delta.get("content") or delta.get("refusal") or ""
