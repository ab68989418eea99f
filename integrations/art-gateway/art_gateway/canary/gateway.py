"""The gateway with a candidate: each call of its conversations goes to it first, and to the provider if it fails."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Coroutine
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from art_core.capture import TIMED_OUT, Exchange, Refused
from art_core.errors import StoreError, UpstreamError
from art_core.types import JsonDict
from art_gateway.app import Gateway, Limits
from art_gateway.canary.routes import FOLLOW_SECONDS, Routes
from art_gateway.checks import MAX_COMMAND_BYTES, check_id, read_change
from art_gateway.routing import Backend, Pool, is_down
from art_gateway.text_gateway import TextGateway, replayed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.types import Message, Receive, Scope, Send

    from art_core.store import Store
    from art_gateway.canary.routes import Candidate
    from art_gateway.routing import Server

log = logging.getLogger("art_gateway")

ROUTES = "/routes"
FINAL = frozenset({401, 403, 408, 409, 413, 421})
"""Statuses of refusals that the provider's side would repeat."""
RETRY_SECONDS = 60.0
"""Pause before a successor that couldn't start is tried again."""
LATENCIES = 1000
"""The newest calls of each side whose seconds are kept."""


class Outcome(Enum):
    """What became of a request that the candidate may answer."""

    DONE = auto()
    """Answered, or refused for good."""
    NOT_ITS_OWN = auto()
    FAILED = auto()
    LEFT_ALONE = auto()
    """Its own, but it was down, or could not have answered."""
    REPLACED = auto()
    """Another candidate took its place meanwhile, which has nothing to do with this request."""


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
        self._last_rest = 0.0
        """When the candidate's last rest that was counted as a failure ends."""
        self._seconds = {name: deque[float](maxlen=LATENCIES) for name in (candidate.name, candidate.live)}

    @property
    def pools(self) -> Sequence[Pool]:
        return self.pool, self._candidates

    def notes(self) -> Sequence[str]:
        routes, wanted = self.routes, self.routes.candidate.share
        said = f"{routes.candidate.name} answers {100 * routes.share:.4g}% of the conversations"
        if routes.share != wanted:
            said += f", as the run folder says (--route: {100 * wanted:.4g}%); change it with art route --set"
        return (said,)

    def chores(self) -> Sequence[Coroutine[Any, Any, None]]:
        follow = [] if self.routes.candidate.successor is None else [self._follow(self.routes.candidate.successor)]
        return [self.routes.follow(), *follow]

    async def _follow(self, successor: Callable[[Server], Server | None]) -> None:
        """Let each successor answer as soon as it has started, until cancelled."""
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            try:
                upstream = successor(self.routes.candidate.upstream)
                if upstream is not None:
                    await _started(upstream)
                    await self._replace(upstream)
            except Exception:  # whatever it is, the served one can still answer
                log.exception(
                    "%s could not be replaced; trying again in %g s", self.routes.candidate.name, RETRY_SECONDS
                )
                await asyncio.sleep(RETRY_SECONDS)

    async def _replace(self, upstream: Server) -> None:
        """Let ``upstream`` answer calls that begin now, and stop the one before it after its calls in flight."""
        [before], inside = self._candidates.backends, self._mine.rollouts_inside
        self._candidates.backends = [Backend(upstream)]
        self._seconds[self.routes.candidate.name].clear()
        self.routes.replace(upstream, inside)
        try:
            while inside := inside & self._mine.rollouts_inside:
                await asyncio.sleep(FOLLOW_SECONDS)
        finally:
            await before.upstream.stop()

    async def abort(self) -> None:
        await self._mine.abort()
        await super().abort()

    async def _at_rollout(self, scope: Scope, receive: Receive, send: Send) -> None:
        rollout_id, path = self._split(scope["path"])
        if not rollout_id or scope["method"] != "POST" or path not in self._dialects:
            return await super()._at_rollout(scope, receive, send)
        began, request = time.monotonic(), _Request(receive)
        exchange = Exchange(scope, request.receive, send)
        exchange.dialect = self._dialects[path]
        outcome = await self._ask_candidate(exchange, scope, rollout_id)
        if outcome is Outcome.DONE:
            return
        answer = _Answer(send)
        await super()._at_rollout(scope, request.again(), answer.send)
        if not answer.good:  # the request's own fault
            return
        if outcome is Outcome.NOT_ITS_OWN:
            self._seconds[self.routes.candidate.live].append(time.monotonic() - began)
        elif outcome is not Outcome.REPLACED:
            self.routes.missed()
        if outcome is Outcome.FAILED:
            self.routes.answered(failed=True)

    async def _ask_candidate(self, exchange: Exchange, scope: Scope, rollout_id: str) -> Outcome:
        """Let the candidate answer, if the conversation is its own."""
        began = time.monotonic()
        async with exchange.answering_errors(log, "a request failed inside the gateway"):
            check_id(scope, rollout_id)
            self._check_page(exchange)
            self._admit(exchange)
            if not self.routes.candidate_answers(rollout_id):
                return Outcome.NOT_ITS_OWN
            await self.ledger.keep_up()
            [backend] = self._candidates.backends
            if not backend.up:
                return Outcome.LEFT_ALONE
            try:
                await self._mine._call(rollout_id, exchange)
            except StoreError:
                raise
            except Exception as error:  # whatever it is, the provider can still answer
                if (isinstance(error, Refused) and error.status in FINAL) or getattr(error, "code", None) == "stopping":
                    raise
                log.warning("%s failed: %s: %s", self.routes.candidate.name, type(error).__name__, error)
                outcome = self._judge(error, backend) if self._is_served(backend) else Outcome.REPLACED
                if not exchange.started:
                    return outcome
                if outcome is Outcome.FAILED:
                    self.routes.answered(failed=True)
                raise
            if exchange.finished and not exchange.dialect.counts_tokens and self._is_served(backend):
                self._seconds[self.routes.candidate.name].append(time.monotonic() - began)
                self.routes.answered(failed=False)
        return Outcome.DONE

    def _is_served(self, backend: Backend) -> bool:
        """Whether no other candidate took its place."""
        return self._candidates.backends[0] is backend

    def _judge(self, error: Exception, backend: Backend) -> Outcome:
        """Return whether an error counts as a failure. Calls that fail together, because it is down, count once."""
        status, code = getattr(error, "status", 500), getattr(error, "code", None)
        if status == 400:  # a request that can't be translated
            return Outcome.LEFT_ALONE
        if code == TIMED_OUT:
            backend.rest(error)
        elif not (isinstance(error, UpstreamError) and is_down(error)):
            return Outcome.FAILED
        together = backend.rests_until == self._last_rest
        self._last_rest = backend.rests_until
        return Outcome.LEFT_ALONE if together else Outcome.FAILED

    async def _command(self, exchange: Exchange, rollout_id: str | None, path: str) -> JsonDict:
        if path != ROUTES:
            return await super()._command(exchange, rollout_id, path)
        self._check_commander()
        if exchange.method == "POST":
            share, why = read_change(await exchange.body(MAX_COMMAND_BYTES))
            self.routes.change(share, why, by_hand=True)
            await asyncio.wrap_future(self.ledger.saved())
        elif exchange.method != "GET":
            raise Refused("use GET /routes or POST /routes", status=405)
        return self.routes.as_json() | {"seconds": {name: _quantiles(it) for name, it in self._seconds.items()}}

    def status(self) -> JsonDict:
        """Return the answer to ``GET /status``."""
        return super().status() | {"share": self.routes.share}


async def _started(upstream: Server) -> None:
    """Start an upstream; if it can't start, stop what has started of it."""
    try:
        await upstream.start()
    except BaseException:
        await upstream.stop()
        raise


class _Request:
    """A request that can be received twice."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        message = await self._receive()
        self._parts.append(message.get("body", b""))
        return message

    def again(self) -> Receive:
        return replayed(b"".join(self._parts), self._receive) if self._parts else self._receive


class _Answer:
    """An answer on its way to the client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._status = 0
        self._ended = False

    @property
    def good(self) -> bool:
        """Whether the whole answer was sent, and it isn't an error."""
        return self._ended and self._status < 400

    async def send(self, message: Message) -> None:
        self._status = message.get("status", self._status)
        await self._send(message)
        self._ended = not message.get("more_body", message["type"] == "http.response.start")


def _quantiles(seconds: deque[float]) -> JsonDict:
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        **{f"p{percent}": ordered[len(ordered) * percent // 100] if ordered else None for percent in (50, 95)},
    }
