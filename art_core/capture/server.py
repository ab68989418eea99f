"""The capture server: an ASGI application that answers and records the model calls of every rollout at its own address.

A call to ``/rollouts/{rollout_id}/v1/chat/completions`` goes through these steps:

1. ``answer`` reads the body, and looks up the rollout and the path's dialect (chat completions, or a plugin's API).
2. ``_call`` imposes the rollout's sampling settings. If a call in flight has the same request id, this one is its retry
   and replaces it. The call is cancelled if its client disconnects or its rollout closes.
3. ``_complete`` or ``_stream`` passes the request through the gate to the upstream (the engine), and adds the sampled
   tokens to a Recording.
4. ``_commit`` records one Call per choice and waits until they would survive the death of this process.
5. Only then is the last byte of the answer sent. A call that ends earlier is recorded as aborted and never trained on.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from art_core.capture.admission import CallActivity, Gate
from art_core.capture.dialect import CHAT_COMPLETIONS, Dialect, Paths
from art_core.capture.http import Exchange, Refused, RelayedCall, error_line
from art_core.capture.record import Recording, for_client, no_token_ids
from art_core.capture.replay import RecordedAnswers
from art_core.capture.shape import check_request, read_object
from art_core.capture.upstream import TIMED_OUT
from art_core.errors import CaptureError, StoreError, UpstreamError
from art_core.types import GREEDY, Call, JsonDict, Recorder, Sampling, Upstream, within

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

logger = logging.getLogger("art_core.capture")

CHAT = "/v1/chat/completions"
MODELS = "/v1/models"


@dataclass
class _Rollout:
    sampling: Sampling
    upstream: Upstream
    replay: RecordedAnswers
    errors: Counter[str] = field(default_factory=Counter)
    """How many requests were answered with an error, by status, code and message."""
    closing: bool = False
    in_flight: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """The calls in flight, by request id."""


@dataclass
class _CallInFlight:
    rollout_id: str
    upstream: Upstream
    recording: Recording
    exchange: Exchange
    body: JsonDict
    """What the client sent, in its dialect."""
    recorded: bool = False


class CaptureApp:
    """Answers ``/rollouts/{rollout_id}/v1/...`` for open rollouts. Must be used from one event loop.

    ``dialects`` maps further paths (``"/v1/responses"``) to their Dialect. ``max_body`` is in bytes. ``gate`` may limit how
    many calls are answered at a time. ``call_timeout`` is how many seconds the upstream may take for a whole answer or, in a
    stream, until the next chunk. If ``trained_nodes`` isn't empty, calls of other nodes keep the agent's own temperature,
    top-p, top-k and seed, and ``frozen``, if set, answers them.
    """

    def __init__(
        self,
        upstream: Upstream,
        recorder: Recorder,
        *,
        dialects: Mapping[str, Dialect] | None = None,
        max_body: int = 64 * 2**20,
        model: str = "policy",
        trained_nodes: Sequence[str] = (),
        frozen: Upstream | None = None,
        gate: Gate | None = None,
        call_timeout: float | None = None,
    ) -> None:
        self.activity = CallActivity()
        self.upstream = upstream
        self.recorder = recorder
        self.gate = gate or Gate()
        self.dialects = {CHAT: CHAT_COMPLETIONS, **(dialects or {})}
        self.paths = Paths([*self.dialects, MODELS])
        self._max_body = max_body
        self._model = model
        self._trained_nodes = tuple(trained_nodes)
        self._frozen = frozen
        self._rollouts: dict[str, _Rollout] = {}
        self._call_timeout = call_timeout
        self._warned = False
        self._stopping = False

    def open(
        self, rollout_id: str, sampling: Sampling, upstream: Upstream | None = None, replayed: Sequence[Call] = ()
    ) -> None:
        """Answer this rollout's calls from now on, from ``upstream`` if set.

        A request that one of the ``replayed`` calls made before gets the same answer. Raises CaptureError if the
        rollout is open already.
        """
        if rollout_id in self._rollouts:
            raise CaptureError(f"rollout {rollout_id!r} is open already; every rollout needs its own id")
        self._rollouts[rollout_id] = _Rollout(sampling, upstream or self.upstream, RecordedAnswers(replayed))

    async def close(self, rollout_id: str, grace: float) -> Mapping[str, int]:
        """Refuse further calls of this rollout, and return the counts of its error answers once its calls are recorded.

        Calls in flight are aborted after ``grace`` seconds. Does nothing if the rollout isn't open.
        """
        if (rollout := self._rollouts.get(rollout_id)) is None:
            return {}
        rollout.closing = True
        if tasks := set(rollout.in_flight.values()):
            _, late = await asyncio.wait(tasks, timeout=grace)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._forget(rollout_id)
        return rollout.errors

    def release(self, rollout_id: str) -> None:
        """Forget a rollout unless it has calls in flight. For callers that open it again at its next call."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is not None and all(task.done() for task in rollout.in_flight.values()):
            self._forget(rollout_id)

    def _forget(self, rollout_id: str) -> None:
        self._rollouts.pop(rollout_id, None)
        self.activity.forget(rollout_id)

    async def close_all(self) -> None:
        """Abort the calls in flight, close every rollout and refuse further calls."""
        self._stopping = True
        await asyncio.gather(*(self.close(rollout_id, 0.0) for rollout_id in list(self._rollouts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        async with exchange.answering_errors(logger, "a model call failed inside the serving process"):
            await self.answer(exchange)

    async def answer(self, exchange: Exchange) -> None:
        """Answer and record a request at a rollout's address. Its errors are for ``Exchange.answering_errors``."""
        rollout_id, path, model = self.paths.split(exchange.path) or ("", "", None)
        exchange.dialect = self.dialects.get(path, CHAT_COMPLETIONS)
        try:
            await self._route(exchange, path, rollout_id, model)
        except Exception as error:
            if rollout := self._rollouts.get(rollout_id):
                rollout.errors[error_line(error)] += 1
            raise

    async def _route(self, exchange: Exchange, path: str, rollout_id: str, model: str | None) -> None:
        is_models = (exchange.method, path) == ("GET", MODELS)
        if not (is_models or (exchange.method == "POST" and path in self.dialects)):
            paths = "".join(f"POST /rollouts/{{rollout_id}}{path}, " for path in self.dialects)
            raise Refused(
                f"{exchange.method} {exchange.path} doesn't exist; use {paths}GET /rollouts/{{rollout_id}}{MODELS}",
                status=404,
                code="unknown_path",
            )
        body = await exchange.body(self._max_body)
        if body is None:
            return
        rollout = self._open_rollout(rollout_id)
        if is_models:
            policy = {"id": self._model, "object": "model", "created": 0, "owned_by": "art"}
            return await exchange.answer(200, {"object": "list", "data": [policy]})
        request_id = _request_id(exchange)
        if relay := getattr(rollout.upstream, "relay", None):
            record = functools.partial(self._record_relayed, rollout_id)
            call = RelayedCall(path, model, body, request_id, record, self.activity.note_progress)
            return await self._run(
                rollout_id, rollout, exchange, request_id, lambda: self._relay(relay, exchange, call)
            )
        try:
            request = read_object(body)
        except ValueError as error:
            raise Refused(f"the request body {error}", status=400, code="invalid_json") from None
        await self._call(rollout_id, rollout, exchange, request if model is None else {"model": model, **request})

    def _open_rollout(self, rollout_id: str) -> _Rollout:
        rollout = self._rollouts.get(rollout_id)
        if self._stopping:
            raise stopping_error()
        if rollout is None or rollout.closing:
            raise Refused(
                f"rollout {rollout_id!r} is not open: it has ended or never started; make model calls before the agent "
                "returns",
                status=404,
                code="rollout_not_open",
            )
        return rollout

    async def _call(self, rollout_id: str, rollout: _Rollout, exchange: Exchange, body: JsonDict) -> None:
        agent = exchange.name("x-art-agent") or exchange.dialect.agent(exchange.headers)
        trained = not self._trained_nodes or within(agent, self._trained_nodes)
        request = exchange.dialect.to_chat(body)
        check_request(request)
        imposed = rollout.sampling if trained else replace(rollout.sampling, temperature=None, top_p=None, top_k=None)
        request = self._with_sampling(imposed, request)
        if exchange.dialect.counts_tokens:
            # Every engine returns a prompt's ids with an answer, so one token is sampled and dropped.
            request |= {"max_completion_tokens": 1, "n": 1, "stream": False}
        request_id = _request_id(exchange)
        recording = Recording(request, request_id, agent, exchange.name("x-art-thread"))
        upstream = rollout.replay.with_fallback(rollout.upstream if trained else self._frozen or rollout.upstream)
        call = _CallInFlight(rollout_id, upstream, recording, exchange, body)
        work = self._stream if request.get("stream") else self._complete
        await self._run(rollout_id, rollout, exchange, request_id, lambda: work(call))

    async def _run(
        self,
        rollout_id: str,
        rollout: _Rollout,
        exchange: Exchange,
        request_id: str,
        work: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        """Do the work of a call, unless its client, its retry or the end of its rollout cancels it first."""
        while predecessor := rollout.in_flight.get(request_id):
            predecessor.cancel()
            await asyncio.wait({predecessor})
            self._open_rollout(rollout_id)
        task = asyncio.create_task(work())
        rollout.in_flight[request_id] = task
        task.add_done_callback(lambda _: rollout.in_flight.pop(request_id, None))
        disconnect = asyncio.create_task(exchange.disconnected())
        try:
            with self.activity.call(rollout_id):
                await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            disconnect.cancel()
            if not task.done():
                # A client that has the whole answer may disconnect, which must not cancel the rest of the work.
                if not exchange.finished:
                    task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            if self._stopping:
                raise stopping_error()
            raise Refused("this call was cancelled: its rollout ended, or its client sent it again", status=409)
        task.result()

    async def _relay(self, relay: Callable[..., Awaitable[None]], exchange: Exchange, call: RelayedCall) -> None:
        async with self.gate:
            await relay(exchange, call)

    async def _record_relayed(self, rollout_id: str, calls: Sequence[Call]) -> None:
        for call in calls:
            self.recorder.record(rollout_id, call)
        await asyncio.wrap_future(self.recorder.saved())

    async def _complete(self, call: _CallInFlight) -> None:
        """Answer with a whole completion."""
        recording = call.recording
        async with self.gate, self._time_limit() as limit:
            # A cancelled upstream may still return what it has sampled.
            completion = await call.upstream.chat(dict(recording.request))
            recording.add(completion)
        cancelled = asyncio.current_task().cancelling() > 0
        if cancelled or limit.expired():
            self._record(call, aborted=True)
            raise asyncio.CancelledError if cancelled else self._timed_out()
        if not recording.choices or any("message" not in choice for choice in completion["choices"]):
            raise no_token_ids("it has no message")
        # Translated before it is recorded, because a client never gets an answer that can't be translated.
        answer = call.exchange.dialect.from_chat(call.body, for_client(completion, recording))
        await self._commit(call)
        await call.exchange.answer(200, answer)

    async def _stream(self, call: _CallInFlight) -> None:
        """Answer with a stream of events, and commit the call before the last one."""
        exchange = call.exchange
        chunks: asyncio.Queue[JsonDict | None] = asyncio.Queue()
        # In its own task, because an agent that stops reading must not delay the engine's next weights.
        sampling = asyncio.create_task(self._sample(call, chunks))

        async def relay() -> AsyncIterator[JsonDict]:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            await sampling
            if not call.recording.choices:
                raise no_token_ids("its stream was empty")
            await self._commit(call)

        try:
            async with aclosing(exchange.dialect.stream_from_chat(call.body, relay())) as events:
                async for event in events:
                    exchange.event(event)
                    # Chunks that arrived in one packet are sent in one.
                    if chunks.empty():
                        await exchange.flush()
            await exchange.flush(last=True)
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
            if not call.recorded:
                self._record(call, aborted=True)

    async def _sample(self, call: _CallInFlight, chunks: asyncio.Queue[JsonDict | None]) -> None:
        """Record the upstream's chunks, and queue them for the client. None ends the queue."""
        recording = call.recording
        try:
            async with (
                self.gate,
                self._time_limit() as limit,
                aclosing(call.upstream.stream(dict(recording.request))) as answer,
            ):
                async for chunk in answer:
                    recording.add(chunk)
                    chunks.put_nowait(for_client(chunk, recording))
                    self.activity.note_progress()
                    if self._call_timeout is not None:
                        limit.reschedule(asyncio.get_running_loop().time() + self._call_timeout)
            if limit.expired():
                raise self._timed_out()
        finally:
            chunks.put_nowait(None)

    @asynccontextmanager
    async def _time_limit(self) -> AsyncIterator[asyncio.Timeout]:
        """Cancel the block after ``call_timeout`` seconds. It ends without an exception, and ``expired()`` is true."""
        limit = asyncio.timeout(self._call_timeout)
        try:
            async with limit:
                yield limit
        except TimeoutError:
            if not limit.expired():  # the engine's own
                raise

    def _timed_out(self) -> UpstreamError:
        message = f"the engine did not answer within {self._call_timeout:g} seconds (call_timeout)"
        return UpstreamError(message, status=504, code=TIMED_OUT)

    async def _commit(self, call: _CallInFlight) -> None:
        """Record a whole answer, and return when it would survive this process. Only then may its end be sent."""
        self._record(call)
        try:
            await asyncio.wrap_future(self.recorder.saved())
        except (StoreError, asyncio.CancelledError):
            self._record(call, aborted=True)  # replaces the answer, which the client never gets
            raise

    def _record(self, call: _CallInFlight, *, aborted: bool = False) -> None:
        call.recorded = True
        if call.exchange.dialect.counts_tokens:
            return
        for choice in call.recording.calls(aborted=aborted):
            self.recorder.record(call.rollout_id, choice)

    def _with_sampling(self, sampling: Sampling, request: JsonDict) -> JsonDict:
        """Return the request with the rollout's settings in place of the agent's."""
        imposed = {name: value for name, value in vars(sampling).items() if value is not None}
        if sampling.temperature:
            imposed["seed"] = None  # the agent's own seed would make the rollouts of a group equal
        replaced = {name: request[name] for name in imposed if request.get(name) not in (None, imposed[name])}
        if replaced and not self._warned:
            self._warned = True
            logger.warning(
                "the agent requests %s but samples with %s: training, and an evaluation with temperature=, sets the "
                "temperature and turns the agent's other sampling settings off; logged once",
                ", ".join(f"{name}={value}" for name, value in replaced.items()),
                ", ".join(f"{name}={imposed[name]}" for name in replaced),
            )
        request = {**request, **imposed}
        if sampling.temperature:
            del request["seed"]
        if 0 < (request.get("temperature") or 0) < GREEDY:
            request["temperature"] = 0  # engines treat it as 0, and logprobs can't be divided by so little
        return request


def _request_id(exchange: Exchange) -> str:
    """Return the id of a request, which is also that of its retries."""
    return exchange.headers.get("x-art-request-id") or uuid.uuid4().hex


def stopping_error() -> UpstreamError:
    """Return the error for a call to a server that is stopping. Another one may start at the same address."""
    return UpstreamError("the server of this address is stopping", status=503, code="stopping", retry_after=5.0)
