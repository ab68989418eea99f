"""The gateway with a candidate: each call of its conversations goes to it first, and to the provider if it fails."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import orjson

from art_core.capture import Exchange, Refused
from art_core.errors import StoreError
from art_core.types import JsonDict
from art_gateway.app import MAX_COMMAND_BYTES, Gateway, Limits, check_id
from art_gateway.canary.routes import Routes
from art_gateway.routing import Pool
from art_gateway.text_gateway import TextGateway

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Message, Receive, Scope, Send

    from art_core.store import Store
    from art_gateway.canary.routes import Candidate

log = logging.getLogger("art_gateway")

ROUTES = "/routes"
LATENCIES = 1000
"""The newest calls of each side whose seconds are kept."""


class CanaryGateway(TextGateway):
    """A TextGateway for the provider, with another Gateway for the candidate; both record in the same store."""

    commands = TextGateway.commands | {ROUTES}

    def __init__(self, pool: Pool, store: Store, *, candidate: Candidate, **options: Any) -> None:
        super().__init__(pool, store, **options)
        self.routes = Routes(store, candidate)
        self.ledger.split_of = self.routes.answerer
        self._candidates = Pool.of([candidate.upstream], retries=0)
        limits = dataclasses.replace(options.pop("limits", None) or Limits(), seconds=candidate.patience)
        self._mine = Gateway(self._candidates, store, ledger=self.ledger, gate=self.gate, limits=limits, **options)
        self._seconds = {name: deque[float](maxlen=LATENCIES) for name in (candidate.name, candidate.live)}

    @property
    def pools(self) -> Sequence[Pool]:
        return self.pool, self._candidates

    def chores(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self.routes.follow()]

    async def abort(self) -> None:
        await self._mine.abort()
        await super().abort()

    async def _at_rollout(self, scope: Scope, receive: Receive, send: Send) -> None:
        rollout_id, path = self._split(scope["path"])
        if not rollout_id or scope["method"] != "POST" or path not in self._dialects:
            return await super()._at_rollout(scope, receive, send)
        began = time.monotonic()
        # A candidate that rests after a failure is not asked, and not blamed.
        asked = self.routes.candidate_answers(rollout_id) and self._candidates.backends[0].up
        if asked:
            request = _Request(receive)
            if await self._ask_candidate(scope, request.receive, send):
                return
            receive = request.again()
        answer = _Answer(send)
        await super()._at_rollout(scope, receive, answer.send)
        if answer.good and asked:
            self.routes.answered(failed=True)
        elif answer.good:
            self._seconds[self.routes.candidate.live].append(time.monotonic() - began)

    async def _ask_candidate(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Let the candidate answer, and return whether it did, or the request is refused whoever answers."""
        exchange, began = Exchange(scope, receive, send), time.monotonic()
        rollout_id, path = self._split(scope["path"])
        exchange.dialect = self._dialects[path]
        async with exchange.answering_errors(log, "a request failed inside the gateway"):
            check_id(scope, rollout_id)
            self._check_page(exchange)
            self._admit(exchange)
            await self.ledger.keep_up()
            try:
                await self._mine._call(rollout_id, exchange)
            except (Refused, StoreError):
                raise
            except Exception as error:  # whatever it is, the provider can still answer
                log.warning("%s failed: %s: %s", self.routes.candidate.name, type(error).__name__, error)
                if not exchange.started:
                    return False
                self.routes.answered(failed=True)
                raise
            self._seconds[self.routes.candidate.name].append(time.monotonic() - began)
            self.routes.answered(failed=False)
        return True

    async def _command(self, exchange: Exchange, rollout_id: str | None, path: str) -> JsonDict:
        if path != ROUTES:
            return await super()._command(exchange, rollout_id, path)
        self._check_commander()
        if exchange.method == "POST":
            share, why = read_share(await exchange.body(MAX_COMMAND_BYTES))
            self.routes.change(share, why)
        elif exchange.method != "GET":
            raise Refused("use GET /routes or POST /routes", status=405)
        return self.routes.as_json() | {"seconds": {name: _quantiles(it) for name, it in self._seconds.items()}}

    def status(self) -> JsonDict:
        """Return the answer to ``GET /status``."""
        return super().status() | {"share": self.routes.share}


class _Request:
    """A request that can be received twice."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._body: list[Message] = []

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._body.append(message)
        return message

    def again(self) -> Receive:
        unread = deque(self._body)

        async def receive() -> Message:
            return unread.popleft() if unread else await self._receive()

        return receive


class _Answer:
    """An answer on its way to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._status = 0
        self._ended = False

    @property
    def good(self) -> bool:
        """Whether it was sent whole, and is no error."""
        return self._ended and self._status < 400

    async def send(self, message: Message) -> None:
        self._status = message.get("status", self._status)
        await self._send(message)
        self._ended = not message.get("more_body", message["type"] == "http.response.start")


def read_share(body: bytes | None) -> tuple[float, str]:
    """Return the share and the reason in a body. Raises Refused (400)."""
    try:
        fields = orjson.loads(body or b"")
        share, why = fields["share"], fields.get("why", "set by hand")
        if not isinstance(why, str) or isinstance(share, bool) or not 0 <= share <= 1:
            raise ValueError
    except (ValueError, TypeError, LookupError, AttributeError):
        raise Refused(
            'the body must be {"share": a number from 0 to 1, "why": an optional text}', status=400, code="share"
        ) from None
    return float(share), why


def _quantiles(seconds: deque[float]) -> JsonDict:
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        **{f"p{percent}": ordered[len(ordered) * percent // 100] if ordered else None for percent in (50, 95)},
    }
