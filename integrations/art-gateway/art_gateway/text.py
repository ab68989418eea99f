"""Recording text in front of any provider: where requests go on to, and which of them belong to one conversation."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Sequence
from urllib.parse import quote

import orjson

from art_core.capture import Exchange, HttpUpstream
from art_core.types import JsonDict
from art_gateway.relay import Record, Relay, Relayed

KEYS = {"/v1/messages": "x-api-key", "/models/": "x-goog-api-key"}
"""Beginning of a path -> the header of its API's key; the others take a bearer token."""
REMEMBERED = 200_000
"""Conversations, by their last answers, that a gateway can tell apart; each takes some 150 bytes."""


class TextUpstream(HttpUpstream):
    """A provider, whose answers have no token ids. ``api_key`` replaces the clients' own."""

    def __init__(self, base_url: str, *, api_key: str | None = None, timeout: float | None = 600.0) -> None:
        super().__init__(base_url, api_key=api_key, timeout=timeout)
        self.policy_version = -1
        self._api_key = api_key
        self._relay = Relay(timeout)

    async def start(self) -> None:
        """Open the connection pool."""
        await self._relay.start()

    async def stop(self) -> None:
        """Close the connections."""
        await self._relay.stop()
        await super().stop()

    async def relay(self, exchange: Exchange, path: str, body: bytes, request_id: str, record: Record) -> None:
        """Send a request to the same path of the provider, and its answer back."""
        await self._relay.relay(
            Relayed(exchange, path, body, request_id), self.url(exchange, path), record, self._key(path)
        )

    def url(self, exchange: Exchange, path: str) -> str:
        """Return where a request goes, with its own model and query; ``path`` is the dialect's."""
        pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))
        found = re.search(f"{pattern}$", exchange.path)
        own = quote(found[0] if found else path, safe="/:@%")
        own = own.removeprefix("/v1") if self.base_url.endswith("/v1") else own
        return f"{self.base_url}{own}{f'?{exchange.query}' if exchange.query else ''}"

    def _key(self, path: str) -> dict[str, str]:
        if self._api_key is None:
            return {}
        header = next((header for beginning, header in KEYS.items() if beginning in path), None)
        return {header: self._api_key} if header else {"authorization": f"Bearer {self._api_key}"}


class Conversations:
    """Which conversation a request continues: the one whose last request and answer it begins with."""

    def __init__(self) -> None:
        self._by_end: OrderedDict[bytes, str] = OrderedDict()

    def continued(self, messages: Sequence[JsonDict]) -> str | None:
        """Return the id of the conversation whose end is the longest beginning of ``messages``; None if they begin one."""
        ends = [self._by_end.get(end) for end in _ends(messages)]
        return next((id for id in reversed(ends) if id is not None), None)

    def add(self, messages: Sequence[JsonDict], id: str) -> None:
        """Remember a conversation that ends with these messages."""
        for end in _ends(messages)[-1:]:
            self._by_end[end] = id
            self._by_end.move_to_end(end)
        while len(self._by_end) > REMEMBERED:
            self._by_end.popitem(last=False)


def _ends(messages: Sequence[JsonDict]) -> list[bytes]:
    """Return a digest of the messages up to each of them."""
    ends, digest = [], b""
    for message in messages:
        digest = hashlib.blake2b(digest + orjson.dumps(_told(message)), digest_size=16).digest()
        ends.append(digest)
    return ends


def _told(message: JsonDict) -> list[object]:
    """Return what a message says, however its client spells it."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return [
        message.get("role"),
        message.get("content") or "",
        [(it.get("name"), _value(it.get("arguments"))) for it in calls],
    ]


def _value(arguments: object) -> object:
    try:
        return orjson.loads(arguments) if isinstance(arguments, str) else arguments
    except orjson.JSONDecodeError:
        return arguments
