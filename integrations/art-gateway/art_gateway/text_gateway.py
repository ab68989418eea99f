"""The gateway in front of a provider: records text by conversations, and passes on everything else."""

from __future__ import annotations

import logging
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import quote

from art_core.capture import Dialect, Exchange
from art_core.errors import UpstreamError
from art_core.types import Call
from art_gateway.app import Gateway, Ledger
from art_gateway.dialects.reading import read_leniently
from art_gateway.text import Conversations

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from art_core.store import Store

log = logging.getLogger("art_gateway")
CONVERSATION = b"x-art-conversation"
"""The header of an answer that names its conversation, if its client didn't."""
ASCII = "".join(map(chr, range(32, 127)))
"""What need not be percent-encoded in a header."""
ODD = (TypeError, AttributeError)
"""What messages of an unexpected form raise. They are the provider's affair, and no later request continues them."""


class TextLedger(Ledger):
    """A Ledger that remembers how conversations end."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.conversations = Conversations()

    def record(self, rollout_id: str, call: Call) -> None:
        """Record a call, and remember what its conversation says so far."""
        super().record(rollout_id, call)
        with suppress(*ODD):
            self.conversations.add(call.messages(), rollout_id)


class TextGateway(Gateway):
    """Answers the provider's own paths too. A call there is recorded in the conversation that it continues, or in a new one."""

    ledger: TextLedger
    _make_ledger = TextLedger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        path = exchange.path
        if path in self.commands or path == "/health" or path.startswith("/rollouts/"):
            return await self._at_rollout(scope, receive, send)
        found = self._paths.split(f"/rollouts/new{path}")
        dialect = self._dialects.get(found[1]) if found and exchange.method == "POST" else None
        exchange.dialect = dialect or exchange.dialect
        async with exchange.answering_errors(log, "a request failed inside the gateway"):
            self._check_page(exchange)
            self._admit(exchange)
            body = await exchange.body(self.max_body)
            if body is None:
                return
            if dialect is None:
                return await self.pool.route("").pass_on(exchange, body)
            id = self._conversation(dialect, body)
            named = {**scope, "path": f"/rollouts/{id}{path}"}
            await self._at_rollout(named, replayed(body, receive), labelled(send, id))

    async def _at_rollout(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request at a rollout's address, or to the gateway itself."""
        await super().__call__(scope, receive, send)

    def _conversation(self, dialect: Dialect, body: bytes) -> str:
        """Return the id of the conversation that a request continues, or of a new one."""
        with suppress(ValueError, UpstreamError, *ODD):
            request = read_leniently(body)
            messages = dialect.to_chat(request).get("messages") if isinstance(request, dict) else None
            if id := self.ledger.conversations.continued(messages or []):
                return id
        return uuid.uuid4().hex


def replayed(body: bytes, receive: Receive) -> Receive:
    """Return what receives a request whose body was read from ``receive``, and then what follows it there."""
    unread: list[Message] = [{"type": "http.request", "body": body}]

    async def receive_again() -> Message:
        return unread.pop() if unread else await receive()

    return receive_again


def labelled(send: Send, id: str) -> Send:
    """Return ``send`` that adds the conversation's id to the head of an answer."""

    async def send_labelled(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (CONVERSATION, quote(id, safe=ASCII).encode())]}
        await send(message)

    return send_labelled
