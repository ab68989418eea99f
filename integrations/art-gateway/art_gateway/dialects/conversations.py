"""What dialects remember between requests, bounded in memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import orjson

from art_gateway.dialects.reading import refused

CACHE_BYTES = 64 * 2**20


class Cache:
    """Values by key; the least recently used ones are dropped. Can be pickled."""

    def __init__(self, limit: int = CACHE_BYTES) -> None:
        self.limit = limit
        """Bytes of all values together."""
        self._size = 0
        self._values: OrderedDict[str, bytes] = OrderedDict()

    def put(self, key: str, value: bytes) -> None:
        """Store a value; it replaces an earlier one of the same key."""
        self._size += len(value) - len(self._values.pop(key, b""))
        self._values[key] = value
        while self._size > self.limit:
            _, oldest = self._values.popitem(last=False)
            self._size -= len(oldest)

    def get(self, key: str) -> bytes | None:
        """Return a value; None if it was never stored or has been dropped."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)


class Conversations:
    """Conversations by response id, for requests that send only what is new."""

    def __init__(self) -> None:
        self._turns = Cache()

    def add(self, response_id: str, previous: str | None, turn: list[Any]) -> None:
        """Store the items that a request and its answer add to the ``previous`` response."""
        self._turns.put(response_id, orjson.dumps([previous, turn]))

    def before(self, response_id: str) -> list[Any]:
        """Return the conversation up to and including a response, in order. Raises UpstreamError 400 if it isn't stored."""
        turns: list[list[Any]] = []
        ancestor: str | None = response_id
        while ancestor is not None:
            stored = self._turns.get(ancestor)
            if stored is None:
                raise refused(
                    f"previous_response_id={response_id!r}, which isn't stored here (another server's, sent with store=false, "
                    f"or older than the last {self._turns.limit >> 20} MiB),",
                    "send the whole conversation as 'input'",
                )
            ancestor, turn = orjson.loads(stored)
            turns.append(turn)
        return [item for turn in reversed(turns) for item in turn]
