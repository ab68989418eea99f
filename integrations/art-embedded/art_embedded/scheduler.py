"""The decode loop: one thread, and one forward pass per step for the prompts and answers of all running generations.

Other threads submit generations and are notified once per step.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from art_core.errors import UpstreamError
from art_core.types import FinishReason
from art_embedded.kv import Batch, KeyValues
from art_embedded.rows import Rows
from art_embedded.sampling import Draw, Sampled, sample

PROMPT_TOKENS_PER_STEP = 2048
"""Total over all prompts. Longer prompts are computed in pieces, so that decoding isn't held up."""


@dataclass(eq=False)
class Generation:
    """One answer being sampled. The decode thread appends tokens; the event loop reads them."""

    prompt: list[int]
    max_tokens: int
    draw: Draw
    loop: asyncio.AbstractEventLoop
    changed: asyncio.Event
    """Set in ``loop`` when the generation has ended and, if ``streaming``, after every step."""
    streaming: bool = False
    is_stopped: Callable[[list[Sampled]], bool] | None = None
    """Called after every token if the request has stop strings."""
    sampled: list[Sampled] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None while it runs; set after the last token was appended."""
    error: UpstreamError | None = None
    cancelled: bool = False
    """Set by the event loop when the answer is no longer needed."""
    cached_tokens: int = 0
    """Prompt tokens that came from the cache."""
    row: int = -1


class Scheduler:
    """Runs generations on a separate thread. ``submit`` and ``call`` are for the event loop."""

    def __init__(self, *, max_rows: int) -> None:
        self.max_rows = max_rows
        self.stop_ids: frozenset[int] = frozenset()
        """Tokens that end an answer."""
        self.counts = {"prompt_tokens": 0, "cached_tokens": 0, "sampled_tokens": 0}
        """Totals under the names of ``EngineBase.counters``; only the decode thread changes them."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Generation] = deque()
        self._calls: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._prompting: list[Generation] = []
        self._decoding: list[Generation] = []
        self._changed: list[Generation] = []
        self._rows: Rows | None = None
        self._running = True
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="art-decode", daemon=True)
        self._thread.start()

    def submit(self, generations: Sequence[Generation]) -> None:
        """Queue generations; they start as soon as rows are free."""
        self._post(lambda: self._waiting.extend(generations))

    def call(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        """Run ``function`` on the decode thread between the running generations and those that wait for a row."""
        future = asyncio.get_running_loop().create_future()
        self._post(lambda: self._calls.append((function, future)))
        return future

    async def stop(self) -> None:
        """Stop the thread; running generations fail."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Stop the thread and wait for it to end."""
        self._inbox.put(self._end)
        self._thread.join()

    def _post(self, message: Callable[[], None]) -> None:
        self._inbox.put(message)
        # Check after the put: if the thread no longer reads its inbox, nobody would notice the message.
        if not self._running:
            raise UpstreamError(
                "the embedded engine has been stopped; call start() before sending requests", status=503
            ) from self._failure

    def _end(self) -> None:
        self._running = False

    def set_key_values(self, key_values: KeyValues, budget: int) -> None:
        """Serve from ``key_values``, which are empty and may use ``budget`` bytes. Decode thread only."""
        self._rows = Rows(key_values, budget, self.max_rows)

    def drop(self) -> None:
        """Let go of the model and its cache, before others are set. Decode thread only."""
        self._rows = None

    def forget(self) -> None:
        """Drop the cache, because the weights have changed. Decode thread only."""
        self.rows.clear()

    @property
    def rows(self) -> Rows:
        if self._rows is None:
            raise _no_model()
        return self._rows

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._running:
                    self._receive()
                    self._retire_cancelled()
                    self._make_calls()
                    self._admit()
                    if self._decoding or self._prompting:
                        self._step()
                    self._notify()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._running = False
            self._fail_all()

    def _receive(self) -> None:
        if not (self._waiting or self._prompting or self._decoding or self._calls):
            self._inbox.get()()
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def _retire_cancelled(self) -> None:
        for generation in [g for g in (*self._prompting, *self._decoding, *self._waiting) if g.cancelled]:
            self._finish(generation, "aborted")

    def _make_calls(self) -> None:
        while self._calls and not (self._prompting or self._decoding):
            function, future = self._calls.popleft()
            try:
                result, error = function(), None
            except Exception as failure:  # noqa: BLE001 - any exception goes to the caller that awaits the result
                result, error = None, failure
            _call_soon(future.get_loop(), _settle, future, result, error)

    def _admit(self) -> None:
        if self._calls:
            return
        if self._rows is None:
            for generation in list(self._waiting):
                generation.error = _no_model()
                self._finish(generation, "aborted")
        budget = PROMPT_TOKENS_PER_STEP - sum(len(g.prompt) - int(self.rows.lengths[g.row]) for g in self._prompting)
        # Each stays in `_waiting` until it has a row, because `_fail_all` must find it if the memory for one isn't enough.
        for generation in list(self._waiting):
            if budget <= 0 or not self.rows.fit(len(generation.prompt) + generation.max_tokens):
                break  # later ones wait too, or a long one would wait as long as short ones come
            if self.rows.place(generation, np.array(generation.prompt, np.int32)):
                self._waiting.remove(generation)
                self._prompting.append(generation)
                generation.cached_tokens = int(self.rows.lengths[generation.row])
                self.counts["prompt_tokens"] += generation.cached_tokens
                self.counts["cached_tokens"] += generation.cached_tokens
                budget -= len(generation.prompt) - generation.cached_tokens

    def _step(self) -> None:
        batch, fed, answering = self._batch()
        logits = self.rows.kv.forward(batch)
        self.counts["prompt_tokens"] += len(batch.ids) - batch.decoding
        rows = self.rows
        for generation, count in fed:
            rows.store(generation.row, count)
        for generation in answering:
            if generation in self._prompting:
                self._prompting.remove(generation)
                self._decoding.append(generation)
        if not answering:
            return
        for generation, token in zip(answering, sample(logits, [g.draw for g in answering]), strict=True):
            self._append(generation, token)

    def _batch(self) -> tuple[Batch, list[tuple[Generation, int]], list[Generation]]:
        """Return the batch, how many tokens it stores for each generation, and the generations that get a token from it."""
        rows, batch = self.rows, Batch()
        rows.pack(self._decoding)
        self._decoding.sort(key=lambda generation: generation.row)
        count = len(self._decoding)
        if count:
            batch.ids = [generation.sampled[-1].token for generation in self._decoding]
            batch.positions = rows.lengths[:count].tolist()
            batch.rows = list(range(count))
            batch.decoding = count
            batch.outputs = list(range(count))
            batch.shared = rows.shared(count)
            rows.history[np.arange(count), batch.positions] = batch.ids
        fed, answering = [(generation, 1) for generation in self._decoding], list(self._decoding)
        budget = PROMPT_TOKENS_PER_STEP
        for generation in self._prompting:
            past, mark, start = int(rows.lengths[generation.row]), int(rows.marks[generation.row]), len(batch.ids)
            run = generation.prompt[past : min(past + budget, mark) if past < mark else past + budget]
            if not run:
                break
            budget -= len(run)
            batch.ids += run
            batch.positions += range(past, past + len(run))
            batch.rows += [generation.row] * len(run)
            batch.runs.append((start, len(batch.ids)))
            fed.append((generation, len(run)))
            if past + len(run) == len(generation.prompt):
                batch.outputs.append(len(batch.ids) - 1)
                answering.append(generation)
        return batch, fed, answering

    def _append(self, generation: Generation, token: Sampled) -> None:
        if generation.draw.grammar is not None and generation.draw.grammar.error is not None:
            generation.error = UpstreamError(generation.draw.grammar.error, status=400)
            self._finish(generation, "aborted")
            return
        generation.sampled.append(token)
        self.counts["sampled_tokens"] += 1
        if token.token in self.stop_ids or (generation.is_stopped and generation.is_stopped(generation.sampled)):
            self._finish(generation, "stop")
        elif len(generation.sampled) >= generation.max_tokens:
            self._finish(generation, "length")
        elif generation.streaming:
            self._changed.append(generation)

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        for queued in (self._waiting, self._prompting, self._decoding):
            if generation in queued:
                queued.remove(generation)
        if generation.row >= 0:
            self.rows.release(generation)
        generation.finish_reason = reason
        self._changed.append(generation)

    def _notify(self) -> None:
        """Notify each event loop once of the requests that have news."""
        events: dict[asyncio.AbstractEventLoop, set[asyncio.Event]] = {}
        for generation in self._changed:
            events.setdefault(generation.loop, set()).add(generation.changed)
        self._changed.clear()
        for loop, changed in events.items():
            _call_soon(loop, _set_all, changed)

    def _fail_all(self) -> None:
        """Fail everything that is still waiting for an answer."""
        cause = f": {type(self._failure).__name__}: {self._failure}" if self._failure else ""
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                break
        for generation in (*self._prompting, *self._decoding, *self._waiting):
            generation.error = UpstreamError(f"the engine stopped before the answer was complete{cause}", status=503)
            self._changed.append(generation)
        for _, future in self._calls:
            error = UpstreamError(f"the engine stopped{cause}", status=503)
            _call_soon(future.get_loop(), _settle, future, None, error)
        self._notify()


def _no_model() -> UpstreamError:
    return UpstreamError(
        "the embedded engine has no model, because loading weights failed; load them again", status=503
    )


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    with suppress(RuntimeError):  # the loop is closed, so nobody waits there any more
        loop.call_soon_threadsafe(function, *arguments)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _set_all(events: set[asyncio.Event]) -> None:
    for event in events:
        event.set()
