"""What a dialect must remember from one request to the next, within a bound. Knows no wire format."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import orjson

from art_gateway.dialects.reading import refused

KEPT_BYTES = 64 * 2**20


class Kept:
    """Values by id; those not asked for longest make room. Can be pickled."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self.limit = limit
        """In bytes, of all values together."""
        self._size = 0
        self._values: OrderedDict[str, bytes] = OrderedDict()

    def put(self, key: str, value: bytes) -> None:
        """Keep a value, in place of an earlier one of this key."""
        self._size += len(value) - len(self._values.pop(key, b""))
        self._values[key] = value
        while self._size > self.limit:
            _, oldest = self._values.popitem(last=False)
            self._size -= len(oldest)

    def get(self, key: str) -> bytes | None:
        """Return a value, or None where it is not kept, or not any more."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)


class Conversations:
    """What was said up to a response, by its id, for requests that send only what is new."""

    def __init__(self) -> None:
        self._kept = Kept()

    def add(self, response_id: str, previous: str | None, said: list[Any]) -> None:
        """Keep what a request added to the response before it, with the answer."""
        self._kept.put(response_id, orjson.dumps([previous, said]))

    def before(self, response_id: str) -> list[Any]:
        """Return what was kept up to and with a response, in order. Raises UpstreamError 400 where it is not kept."""
        parts: list[list[Any]] = []
        ancestor: str | None = response_id
        while ancestor is not None:
            kept = self._kept.get(ancestor)
            if kept is None:
                raise refused(
                    f"previous_response_id={response_id!r}, which is not kept here (another server's, stored with store=false, "
                    f"or older than the last {self._kept.limit >> 20} MiB),",
                    "send the whole conversation as 'input'",
                )
            ancestor, said = orjson.loads(kept)
            parts.append(said)
        return [one for said in reversed(parts) for one in said]
