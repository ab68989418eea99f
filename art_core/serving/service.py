"""A thread with its own event loop in which calls are answered: engine, recorder and HTTP server, and their orders.

The same in a child process and in a test's own process. Knows nothing about how orders reach it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from art_core.capture.admission import Look
from art_core.capture.listening import address_of, http_server, listen
from art_core.capture.server import CaptureApp, Dialect
from art_core.errors import CaptureError
from art_core.serving.engine_protocols import Counts, KeepsFiles, Rests, Scores, ServesVersions
from art_core.types import Call, Engine, Recorder, Sampling, Upstream, Weights


@dataclass(frozen=True)
class ServingPlan:
    """What to serve, and where."""

    engine: Callable[[], Engine]
    recorder: Callable[[], Recorder]
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    dialects: Mapping[str, Dialect] = field(default_factory=dict)
    max_body: int = 64 * 2**20
    """Of a request, in bytes."""
    trained_nodes: tuple[str, ...] = ()
    """Empty: all."""
    frozen: Callable[[], Engine] | None = None
    """Answers the calls of other nodes; None: ``engine`` does."""
    frozen_start: bool = False
    """Whether ``frozen`` has the policy's start weights: an engine that keeps them needs no second one beside it."""
    folder: Path | None = None
    """Where the engine may keep files."""
    call_timeout: float | None = None
    """Seconds that the engine may take to answer a call."""


class Serving:
    """Answers calls from ``start`` until ``stop``. Every order is a coroutine of the thread's own loop, given by ``ask``."""

    def __init__(self, plan: ServingPlan) -> None:
        self._plan = plan
        self._ready: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._finished: concurrent.futures.Future[None] = concurrent.futures.Future()
        for future in (self._ready, self._finished):
            # Whoever waits for them may be cancelled; they still come true.
            future.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name="art-capture", daemon=True)
        self._asking = threading.Lock()
        self._over = False
        """Whether the loop takes no more orders."""

    def start(self) -> concurrent.futures.Future[str]:
        """Start the thread; the future gives the address, or what kept the engine, the recorder or the port from starting."""
        self.loop = asyncio.new_event_loop()
        self._thread.start()
        return self._ready

    def ask(self, order: str, *args: object) -> concurrent.futures.Future:
        """Run one of the orders (open, close, flush, pause, resume, load, score, counters, rest, wake, look) in the thread's
        loop."""
        with self._asking:
            if self._over:
                why = self._finished.exception() if self._finished.done() else None
                raise CaptureError("the serving thread has ended; start a new door") from why
            return asyncio.run_coroutine_threadsafe(self._orders[order](*args), self.loop)

    def stop(self) -> concurrent.futures.Future[None]:
        """End the loop; a start that is still under way is cancelled. The future gives what was raised while ending."""
        # A loop that is closed has ended by itself.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self._stop()))
        return self._finished

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                try:
                    runner.run(self._main())
                finally:
                    with self._asking:
                        self._over = True
                    # What was asked until now becomes tasks, which the runner cancels as it does all that are left.
                    runner.run(asyncio.sleep(0))
        except BaseException as error:  # noqa: BLE001  the thread's boundary: whoever waits for it raises the error
            if not self._ready.done():
                self._ready.set_exception(error)
                self._finished.set_result(None)
            else:
                self._finished.set_exception(error)
        else:
            self._finished.set_result(None)

    async def _main(self) -> None:
        plan = self._plan
        self._main_task = asyncio.current_task()
        self._loading = asyncio.Lock()
        self._versions = _Versions()
        self._orders: dict[str, Callable[..., Awaitable[object]]] = {
            "open": self._open,
            "close": self._close,
            "flush": self._flush,
            "pause": self._pause,
            "resume": self._resume,
            "load": self._load,
            "score": self._score,
            "counters": self._counters,
            "rest": self._rest,
            "wake": self._wake,
            "look": self._look,
        }
        async with contextlib.AsyncExitStack() as stack:
            # The port first: it fails at once, an engine may take minutes.
            listener = stack.enter_context(listen(plan.host, plan.port))
            self._recorder = plan.recorder()
            stack.callback(self._recorder.close)
            self._engine = await _started(plan.engine, stack, plan.folder)
            self._app = CaptureApp(
                self._engine,
                self._recorder,
                dialects=plan.dialects,
                max_body=plan.max_body,
                trained_nodes=plan.trained_nodes,
                frozen=await self._frozen(stack),
                call_timeout=plan.call_timeout,
            )
            self._server = http_server(self._app)
            serving = asyncio.create_task(self._server.serve(sockets=[listener]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.002)
            self._ready.set_result(address_of(plan.host, listener.getsockname()[1]))
            await serving

    async def _frozen(self, stack: contextlib.AsyncExitStack) -> Upstream | None:
        plan, engine = self._plan, self._engine
        if plan.frozen_start and isinstance(engine, ServesVersions) and engine.keeps_start():
            return engine.at(0)
        return await _started(plan.frozen, stack, plan.folder) if plan.frozen else None

    async def _open(self, rollout_id: str, sampling: Sampling, newest: bool, answered: Sequence[Call]) -> None:
        if newest or not isinstance(self._engine, ServesVersions):
            return self._app.open(rollout_id, sampling, answered=answered)
        self._app.open(rollout_id, sampling, self._engine.at(self._versions.newest), answered)
        self._versions.begun(rollout_id)

    async def _close(self, rollout_id: str, grace: float) -> Mapping[str, int]:
        failed = await self._app.close(rollout_id, grace)
        await self._retire(self._versions.ended(rollout_id))
        await self._flush()
        return failed

    async def _flush(self) -> None:
        await asyncio.to_thread(self._recorder.flush)

    async def _pause(self) -> None:
        await self._app.gate.pause()

    async def _resume(self) -> None:
        await self._app.gate.resume()

    async def _load(self, weights: Weights) -> None:
        engine = self._engine
        async with self._loading:
            if isinstance(engine, ServesVersions) and engine.overlaps(weights):
                await engine.load(weights)
            else:
                async with self._app.gate.held():
                    await engine.load(weights)
            await self._retire(self._versions.loaded(weights.version))

    async def _retire(self, versions: Sequence[int]) -> None:
        if isinstance(self._engine, ServesVersions):
            for version in versions:
                await self._engine.retire(version)

    async def _score(self, ids: Sequence[int]) -> list[float] | None:
        return await self._engine.score(ids) if isinstance(self._engine, Scores) else None

    async def _counters(self) -> dict[str, float]:
        return dict(await self._engine.counters()) if isinstance(self._engine, Counts) else {}

    async def _look(self) -> Look:
        return self._app.activity.look(self._app.gate)

    async def _rest(self) -> None:
        if isinstance(self._engine, Rests):
            await self._engine.rest()

    async def _wake(self) -> None:
        if isinstance(self._engine, Rests):
            await self._engine.wake()

    async def _stop(self) -> None:
        if not self._ready.done():
            self._main_task.cancel()
            return
        await self._app.close_all()
        self._server.should_exit = True


class _Versions:
    """Which version of the weights every open rollout began with."""

    def __init__(self) -> None:
        self.newest = 0
        self._served = {0}
        self._of: dict[str, int] = {}

    def begun(self, rollout_id: str) -> None:
        self._of[rollout_id] = self.newest

    def ended(self, rollout_id: str) -> list[int]:
        """Return the versions that nobody needs any more."""
        self._of.pop(rollout_id, None)
        return self._unneeded()

    def loaded(self, version: int) -> list[int]:
        """Return the versions that nobody needs any more."""
        self.newest = version
        self._served.add(version)
        return self._unneeded()

    def _unneeded(self) -> list[int]:
        unneeded = sorted(self._served - {self.newest, *self._of.values()})
        self._served -= set(unneeded)
        return unneeded


async def _started(make: Callable[[], Engine], stack: contextlib.AsyncExitStack, folder: Path | None) -> Engine:
    engine = make()
    if folder is not None and isinstance(engine, KeepsFiles):
        engine.begin(folder)
    await engine.start()
    stack.push_async_callback(engine.stop)
    return engine
