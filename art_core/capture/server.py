"""The one door: an ASGI application that answers chat completions at every rollout's own address and records them.

What answers is an Upstream, what keeps the calls is a Recorder; it knows nothing about engines, SQLite or processes.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import orjson

from art_core.capture.activity import Activity
from art_core.capture.admission import Gate
from art_core.capture.http import Exchange, Receive, Refused, Scope, Send, error_line
from art_core.capture.record import Recording, no_token_ids, visible
from art_core.capture.replay import Answers
from art_core.capture.requests import checked, json_object, name
from art_core.capture.upstream import TIMED_OUT
from art_core.errors import CaptureError, StoreError, UpstreamError
from art_core.types import GREEDY, Call, JsonDict, Recorder, Sampling, Upstream, within

logger = logging.getLogger("art_core.capture")

CHAT = "/v1/chat/completions"
MODELS = "/v1/models"


class Dialect(Protocol):
    """Another API at a rollout's address, as translation to and from chat completions.

    Optional: ``prepare()`` is called once, in a thread, before the first call, and may take its time; ``error(message, status,
    code) -> body`` and ``error_event(message, status, code) -> event`` say errors in the API's own shape.
    """

    def to_chat(self, body: JsonDict) -> JsonDict: ...

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict: ...

    def stream_from_chat(self, body: JsonDict, chunks: AsyncIterable[JsonDict]) -> AsyncGenerator[str | bytes]:
        """Yield whole server-sent events, framing included."""
        ...


class ChatCompletions:
    """The dialect that needs no translation."""

    def to_chat(self, body: JsonDict) -> JsonDict:
        return body

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict:
        return completion

    async def stream_from_chat(self, body: JsonDict, chunks: AsyncIterable[JsonDict]) -> AsyncGenerator[bytes]:
        async for chunk in chunks:
            yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        yield b"data: [DONE]\n\n"


@dataclass
class _Rollout:
    sampling: Sampling
    upstream: Upstream
    answers: Answers
    failed: Counter[str] = field(default_factory=Counter)
    """Requests that were answered with an error, by status, code and message."""
    closing: bool = False
    answering: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By request id: a retry ends the request that it repeats."""


@dataclass(frozen=True)
class _Asked:
    """A call on its way."""

    rollout_id: str
    upstream: Upstream
    recording: Recording
    exchange: Exchange
    dialect: Dialect
    body: JsonDict
    """As the client sent it, in the dialect's own terms."""


class CaptureApp:
    """Answers ``/rollouts/{rollout_id}/v1/...`` for the rollouts that are open. Lives in one event loop.

    ``max_body`` is in bytes. ``dialects`` are further paths (``"/v1/responses"``) with their translation. ``gate`` may limit the
    calls that are answered at a time; ``call_timeout`` is for one of these, in seconds, streaming between two chunks. Calls of
    nodes other than ``trained_nodes`` keep the agent's own sampling, and ``frozen`` answers them where there is one.
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
        self.activity = Activity()
        self.upstream = upstream
        self.recorder = recorder
        self.gate = gate or Gate()
        self._dialects: dict[str, Dialect] = {CHAT: ChatCompletions(), **(dialects or {})}
        self._max_body = max_body
        self._model = model
        self._trained_nodes = tuple(trained_nodes)
        self._frozen = frozen
        self._rollouts: dict[str, _Rollout] = {}
        self._prepared: dict[str, asyncio.Task[None]] = {}
        self._call_timeout = call_timeout
        self._said = False
        self._stopping = False

    def open(
        self, rollout_id: str, sampling: Sampling, upstream: Upstream | None = None, answered: Sequence[Call] = ()
    ) -> None:
        """Answer this rollout's calls from now on, from an upstream of its own where one is given.

        What was asked in a call that is ``answered`` gets the same answer again. Raises CaptureError where it is open already.
        """
        if rollout_id in self._rollouts:
            raise CaptureError(f"rollout {rollout_id!r} is open already; give every run of an agent an id of its own")
        self._rollouts[rollout_id] = _Rollout(sampling, upstream or self.upstream, Answers(answered))

    async def close(self, rollout_id: str, grace: float) -> Mapping[str, int]:
        """Refuse further calls of this rollout; return when those in flight are recorded, with what was answered with an error.

        They get ``grace`` seconds to end by themselves, then they are aborted. Closing what is not open changes nothing.
        """
        rollout = self._rollouts.get(rollout_id)
        if rollout is None:
            return {}
        rollout.closing = True
        tasks = set(rollout.answering.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        self._rollouts.pop(rollout_id, None)
        self.activity.forget(rollout_id)
        return rollout.failed

    def release(self, rollout_id: str) -> None:
        """Forget a rollout that has no call in flight, for those who open it again at its next call."""
        rollout = self._rollouts.get(rollout_id)
        if rollout is not None and all(task.done() for task in rollout.answering.values()):
            del self._rollouts[rollout_id]
            self.activity.forget(rollout_id)

    async def close_all(self) -> None:
        """Abort what is in flight, close every rollout and answer no more."""
        self._stopping = True
        await asyncio.gather(*(self.close(rollout_id, 0.0) for rollout_id in list(self._rollouts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        async with exchange.failing_as_answer(logger, "a model call failed inside the serving process"):
            await self.answer(exchange)

    async def answer(self, exchange: Exchange) -> None:
        """Answer a request at a rollout's address, recording it. What it raises is the answer: ``failing_as_answer`` tells it."""
        head, _, tail = exchange.path.rpartition("/v1/")
        # Anthropic's clients add /v1 themselves to the address that they are given, which ends in it.
        path, rollout_id = f"/v1/{tail}", head.removeprefix("/rollouts/").removesuffix("/v1")
        try:
            await self._answer(exchange, path, rollout_id, known_path=rollout_id != head)
        except Exception as error:
            if rollout := self._rollouts.get(rollout_id):
                rollout.failed[error_line(error)] += 1
            raise

    async def _answer(self, exchange: Exchange, path: str, rollout_id: str, *, known_path: bool) -> None:
        dialect = exchange.speaks = self._dialects.get(path)
        known = (exchange.method, path) == ("GET", MODELS) or (exchange.method == "POST" and dialect is not None)
        if not known or not known_path:
            answered = ", ".join(f"POST /rollouts/{{rollout_id}}{path}" for path in self._dialects)
            raise Refused(
                f"{exchange.method} {exchange.path} is not answered here; these are: {answered}, "
                f"GET /rollouts/{{rollout_id}}{MODELS}",
                status=404,
                code="unknown_path",
            )
        body = await exchange.body(self._max_body)
        if body is None:
            return
        rollout = self._rollout(rollout_id)
        if dialect is None:
            model = {"id": self._model, "object": "model", "created": 0, "owned_by": "art"}
            return await exchange.answer(200, {"object": "list", "data": [model]})
        await self._prepare(path, dialect)
        await self._chat(rollout_id, rollout, exchange, dialect, json_object(body))

    async def _prepare(self, path: str, dialect: Dialect) -> None:
        """Let a dialect load what it needs in a thread: the other calls go on meanwhile."""
        prepare = getattr(dialect, "prepare", None)
        if prepare is None:
            return
        if path not in self._prepared:
            self._prepared[path] = asyncio.create_task(asyncio.to_thread(prepare))
        await asyncio.shield(self._prepared[path])

    def _rollout(self, rollout_id: str) -> _Rollout:
        rollout = self._rollouts.get(rollout_id)
        if self._stopping:
            raise stopping()
        if rollout is None or rollout.closing:
            raise Refused(
                f"rollout {rollout_id!r} is not open: it has ended, or it was never started here; a model call must be "
                "made before the agent's run returns",
                status=404,
                code="rollout_not_open",
            )
        return rollout

    async def _chat(
        self, rollout_id: str, rollout: _Rollout, exchange: Exchange, dialect: Dialect, body: JsonDict
    ) -> None:
        agent = name(exchange.headers.get("x-art-agent"))
        trained = self._trains(agent)
        sampling = rollout.sampling if trained else Sampling()
        request = self._sampled_as(sampling, checked(dialect.to_chat(body)))
        request_id = exchange.headers.get("x-art-request-id") or uuid.uuid4().hex
        while predecessor := rollout.answering.get(request_id):
            predecessor.cancel()
            await asyncio.wait({predecessor})
            self._rollout(rollout_id)
        recording = Recording(request, request_id, agent, name(exchange.headers.get("x-art-thread")))
        answering = self._stream if request.get("stream") else self._complete
        upstream = rollout.answers.before(rollout.upstream if trained or self._frozen is None else self._frozen)
        task = asyncio.create_task(answering(_Asked(rollout_id, upstream, recording, exchange, dialect, body)))
        rollout.answering[request_id] = task
        task.add_done_callback(lambda _: rollout.answering.pop(request_id, None))
        gone = asyncio.create_task(exchange.disconnected())
        try:
            with self.activity.call(rollout_id):
                await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not task.done():
                # Who has the whole answer has gone too; what follows it must not be cancelled.
                if not exchange.finished:
                    task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            if self._stopping:
                raise stopping()
            raise Refused("this call was stopped: its rollout ended, or its client sent it again", status=409)
        task.result()

    def _trains(self, agent: str | None) -> bool:
        return not self._trained_nodes or within(agent, self._trained_nodes)

    async def _complete(self, asked: _Asked) -> None:
        recording = asked.recording
        async with self.gate, self._limit() as limit:
            # Where the client has gone, or the time is over, this is cancelled; an upstream may then still return what it
            # has sampled.
            completion = await asked.upstream.chat(dict(recording.request))
            recording.add(completion)
        stopped = asyncio.current_task().cancelling() > 0
        if stopped or limit.expired():
            self._record(asked, aborted=True)
            raise asyncio.CancelledError if stopped else self._unanswered()
        if not recording.choices or any("message" not in choice for choice in completion["choices"]):
            raise no_token_ids("it has no message")
        # Before it is recorded: what cannot be told to the client has not been answered.
        answer = asked.dialect.from_chat(asked.body, visible(completion, recording.request_id))
        await self._keep(asked)
        await asked.exchange.answer(200, answer)

    async def _stream(self, asked: _Asked) -> None:
        recording, exchange = asked.recording, asked.exchange
        chunks: asyncio.Queue[JsonDict | None] = asyncio.Queue()
        # Sampling never waits for the client to read: an agent that stops reading would hold the next weights up.
        sampling = asyncio.create_task(self._sample(asked, chunks))
        recorded = False

        async def relay() -> AsyncIterator[JsonDict]:
            nonlocal recorded
            while (chunk := await chunks.get()) is not None:
                yield chunk
            await sampling
            if not recording.choices:
                raise no_token_ids("its stream was empty")
            recorded = True
            await self._keep(asked)

        try:
            async with aclosing(asked.dialect.stream_from_chat(asked.body, relay())) as events:
                async for event in events:
                    exchange.event(event.encode() if isinstance(event, str) else event)
                    # What came in one packet leaves in one.
                    if chunks.empty():
                        await exchange.flush()
            await exchange.end()
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)
            if not recorded:
                self._record(asked, aborted=True)

    async def _sample(self, asked: _Asked, chunks: asyncio.Queue[JsonDict | None]) -> None:
        recording = asked.recording
        try:
            async with (
                self.gate,
                self._limit() as limit,
                aclosing(asked.upstream.stream(dict(recording.request))) as answer,
            ):
                async for chunk in answer:
                    recording.add(chunk)
                    chunks.put_nowait(visible(chunk, recording.request_id))
                    self.activity.moved()
                    if self._call_timeout is not None:
                        limit.reschedule(asyncio.get_running_loop().time() + self._call_timeout)
            if limit.expired():
                raise self._unanswered()
        finally:
            chunks.put_nowait(None)

    @asynccontextmanager
    async def _limit(self) -> AsyncIterator[asyncio.Timeout]:
        """End the block when the engine has had its time; the limit is ``expired`` then."""
        limit = asyncio.timeout(self._call_timeout)
        try:
            async with limit:
                yield limit
        except TimeoutError:
            if not limit.expired():  # one of the engine's own
                raise

    def _unanswered(self) -> UpstreamError:
        said = f"the engine had not answered after {self._call_timeout:g} seconds (call_timeout)"
        return UpstreamError(said, status=504, code=TIMED_OUT)

    def _record(self, asked: _Asked, *, aborted: bool = False) -> None:
        for call in asked.recording.calls(aborted=aborted):
            self.recorder.record(asked.rollout_id, call)

    async def _keep(self, asked: _Asked) -> None:
        """Record an answer and return when it would survive this process: only then may the client have the end of it."""
        self._record(asked)
        try:
            await asyncio.wrap_future(self.recorder.saved())
        except StoreError:
            self._record(asked, aborted=True)  # in place of the one that the client will never have
            raise

    def _sampled_as(self, sampling: Sampling, request: JsonDict) -> JsonDict:
        imposed = {
            key: value for key in ("temperature", "top_p", "top_k") if (value := getattr(sampling, key)) is not None
        }
        if sampling.temperature:
            imposed["seed"] = None  # With a seed of the agent's, the runs of a group would be the same.
        asked = {key: request[key] for key in imposed if request.get(key) not in (None, imposed[key])}
        if asked and not self._said:
            self._said = True
            logger.warning(
                "the agent asks for %s and is answered with %s: the run's own temperature= comes first, 1.0 in training, which "
                "compares runs that differ (said once)",
                _listed(asked),
                _listed({key: imposed[key] for key in asked}),
            )
        sampled = {
            key: value for key, value in {**request, **imposed}.items() if key not in imposed or value is not None
        }
        if 0 < (sampled.get("temperature") or 0) < GREEDY:
            sampled["temperature"] = 0  # as engines take it; a logprob cannot be divided by so little
        return sampled


def stopping() -> UpstreamError:
    """Return the error for a call while what serves it stops; another may be started at the same address."""
    return UpstreamError("the server of this address is stopping", status=503, code="stopping", retry_after=5.0)


def _listed(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())
