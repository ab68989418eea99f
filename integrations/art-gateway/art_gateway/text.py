"""Recording text in front of any provider: where a request is sent, and which conversation it belongs to."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict, deque
from collections.abc import Sequence
from urllib.parse import urlsplit

import orjson

from art_core.capture import Exchange, HttpUpstream, RelayedCall
from art_core.types import JsonDict
from art_gateway.relay import Relay

KEYS = {"/v1/messages": "x-api-key", "/models/": "x-goog-api-key"}
"""Part of a path -> the header of its API's key; the others take a bearer token."""
VERSION = re.compile(r"/v1(beta1?)?(?=/)")
REMEMBERED = 200_000
"""Conversations, by their last answers, that a gateway can tell apart; each takes some 150 bytes."""


class TextUpstream(HttpUpstream):
    """A provider, whose answers have no token ids. ``api_key``, or a user in the address, replaces the clients' own keys."""

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

    async def relay(self, exchange: Exchange, call: RelayedCall) -> None:
        """Send a request to the same path of the provider, and its answer back."""
        await self._relay.relay(exchange, call, self.url(below_rollout(exchange)), self._key(exchange.path))

    async def pass_on(self, exchange: Exchange, body: bytes) -> None:
        """Do the same for a request that is not a model call, without recording it."""
        await self._relay.pass_on(exchange, body, self.url(below_rollout(exchange)), self._key(exchange.path))

    def url(self, target: str) -> str:
        """Return where a request goes. A base URL with a path has the API's version in it already."""
        has_path = urlsplit(self.base_url).path != ""
        return self.base_url + (VERSION.sub("", target, count=1) if has_path and VERSION.match(target) else target)

    def _key(self, path: str) -> dict[str, str]:
        if self._api_key is not None:
            header = next((header for part, header in KEYS.items() if part in path), None)
            return {header: self._api_key} if header else {"authorization": f"Bearer {self._api_key}"}
        return {name: value for name, value in self._headers.items() if name == "authorization"}


def below_rollout(exchange: Exchange) -> str:
    """Return the path and query of a request, encoded as they were sent, without the rollout's own part.

    That part ends before the first ``/v1``, or is one segment long.
    """
    if not exchange.target.startswith("/rollouts/"):
        return exchange.target
    named, version, rest = exchange.target.partition("/v1")
    if version:
        return f"/v1{rest}"
    return f"/{'/'.join(named.split('/')[3:])}"


class Conversations:
    """Which conversation a request continues: the one whose last request and answer it begins with.

    If several are the same so far, each is continued once, in the order in which they were recorded.
    """

    def __init__(self) -> None:
        self._by_end: OrderedDict[bytes, deque[str]] = OrderedDict()

    def continued(self, messages: Sequence[JsonDict]) -> str | None:
        """Return the id of the conversation whose end is the longest beginning of ``messages``; None if they begin one."""
        for end in reversed(_ends(messages)):
            if ids := self._by_end.get(end):
                # The only one stays, for a client that sends a request again or asks for another answer.
                return ids.popleft() if len(ids) > 1 else ids[0]
        return None

    def add(self, messages: Sequence[JsonDict], id: str) -> None:
        """Remember a conversation that ends with these messages."""
        end = _ends(messages)[-1]
        self._by_end.setdefault(end, deque()).append(id)
        self._by_end.move_to_end(end)
        while len(self._by_end) > REMEMBERED:
            self._by_end.popitem(last=False)


def _ends(messages: Sequence[JsonDict]) -> list[bytes]:
    """Return a digest of the messages up to each of them."""
    ends, digest = [], b""
    for message in messages:
        digest = hashlib.blake2b(digest + orjson.dumps(_said(message)), digest_size=16).digest()
        ends.append(digest)
    return ends


def _said(message: JsonDict) -> list[object]:
    """Return what a message says, however its client spells it."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        others = [part for part in parts if part.get("type") != "text"]
        content = others or "".join(str(part.get("text") or "") for part in parts)
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    text = content.strip() if isinstance(content, str) else content or ""
    return [message.get("role"), text, [(it.get("name"), _value(it.get("arguments"))) for it in calls]]


def _value(arguments: object) -> object:
    try:
        return orjson.loads(arguments) if isinstance(arguments, str) else arguments
    except orjson.JSONDecodeError:
        return arguments
