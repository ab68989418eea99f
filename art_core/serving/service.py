"""A thread with an event loop of its own, in which engine, recorder and HTTP server answer calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from art_core.capture.admission import Look
from art_core.capture.listening import address_of, http_server, listen
from art_core.capture.server import CaptureApp, Dialect
from art_core.errors import CaptureError
from art_core.types import Call, Engine, EngineBase, Recorder, Sampling, Weights, with_defaults


@dataclass(frozen=True)
class ServingPlan:
    """What to serve, and where. Pickled by module name for a child process."""

    engine: Callable[[], Engine]
    recorder: Callable[[], Recorder]
    host: str = "127.0.0.1"
    """An address of this machine that the agents can reach; whoever knows a rollout's address can call the policy."""
    port: int = 0
    """0 takes a free one."""
    dialects: Mapping[str, Dialect] = field(default_factory=dict)
    max_body: int = 64 * 2**20
    """Of a request, in bytes."""
    trained_nodes: Sequence[str] = ()
    """Empty: all."""
    frozen: Callable[[], Engine] | None = None
    """Answers the calls of the other nodes; None: ``engine`` does."""
    frozen_start: bool = False
    """Whether ``frozen`` has the policy's start weights; an engine that keeps those needs no second one beside it."""
    folder: Path | None = None
    """Where the engine may write files."""
    call_timeout: float | None = None
    """Seconds that the engine may take to answer a call."""


class Serving:
    """The commands. Runs in the loop that answers the calls; ``ServingProxy`` sends them there."""

    def __init__(self, engine: Any, recorder: Recorder, app: CaptureApp, address: str) -> None:
        self._engine, self._recorder, self._app, self._address = engine, recorder, app, address
        self._swapping = asyncio.Lock()
        self._resting = False
        self._newest = 0
        self._loaded = {0}
        """Versions that are not retired."""
        self._began_with: dict[str, int] = {}
        """The version of every open rollout that does not follow the newest."""

    async def open(
        self,
        rollout_id: str,
        sampling: Sampling | None = None,
        *,
        newest: bool = False,
        answered: Sequence[Call] = (),
    ) -> str:
        """Answer a rollout's calls from now on and return its base URL, for any OpenAI-compatible client.

        ``newest`` answers every call with the newest weights, even if the engine could stay with those that the rollout
        began with: for an address that outlives steps. ``answered`` are calls of an interrupted rollout: the same
        requests get the same answers again, each once.
        """
        upstream = None if newest else self._engine.at(self._newest)
        self._app.open(rollout_id, sampling or Sampling(), upstream, answered)
        if not newest:
            self._began_with[rollout_id] = self._newest
        return f"{self._address}/rollouts/{quote(rollout_id, safe='')}/v1"

    async def close(self, rollout_id: str, grace: float = 1.0) -> Mapping[str, int]:
        """Refuse further calls of a rollout; return when its calls are on disk, with its error answers, counted.

        Calls in flight get ``grace`` seconds, then they are aborted. Raises StoreError if they cannot be written.
        """
        failed = await self._app.close(rollout_id, grace)
        self._began_with.pop(rollout_id, None)
        await self._retire_unused()
        await self.flush()
        return failed

    async def flush(self) -> None:
        """Return when every answered call is on disk. Raises StoreError if they cannot be written."""
        await asyncio.to_thread(self._recorder.flush)

    async def pause(self, *, rest: bool = False) -> None:
        """Hold new calls; return when none is in flight. ``rest`` lets the engine release memory until the next
        ``swap`` or ``resume``."""
        await self._app.gate.pause()
        if rest:
            await self._engine.rest()
            self._resting = True

    async def resume(self) -> None:
        """Release the calls that ``pause`` holds."""
        try:
            await self._wake()
        finally:
            await self._app.gate.resume()

    async def swap(self, weights: Weights, probe: Sequence[int] = ()) -> list[float] | None:
        """Serve these weights to new calls or, if the engine serves several versions, to new rollouts; calls in flight
        end with the old ones. Return the logprobs of ``probe`` under them, as ``score`` does. Paused calls stay
        paused."""
        async with self._swapping:
            await self._wake()
            async with contextlib.nullcontext() if self._engine.overlaps(weights) else self._app.gate.held():
                await self._engine.load(weights)
            self._newest = weights.version
            self._loaded.add(weights.version)
            await self._retire_unused()
        return await self.score(probe)

    async def score(self, ids: Sequence[int]) -> list[float] | None:
        """Return what ``EngineBase.score`` returns; None for an empty text or if the engine cannot score."""
        return await self._engine.score(ids) if ids else None

    async def counters(self) -> Mapping[str, float]:
        """Return what ``EngineBase.counters`` returns."""
        return dict(await self._engine.counters())

    async def activity(self) -> Look:
        """Return what the calls do at this moment."""
        return self._app.activity.look(self._app.gate)

    async def _wake(self) -> None:
        if self._resting:
            self._resting = False
            await self._engine.wake()

    async def _retire_unused(self) -> None:
        unused = self._loaded - {self._newest, *self._began_with.values()}
        self._loaded -= unused
        for version in sorted(unused):
            await self._engine.retire(version)


class ServingThread:
    """Runs a ``Serving`` in a thread of this process."""

    def __init__(self, plan: ServingPlan) -> None:
        self._plan = plan
        self._ready: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._finished: concurrent.futures.Future[None] = concurrent.futures.Future()
        for future in (self._ready, self._finished):
            # Its waiter may be cancelled; it is set all the same.
            future.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name="art-capture", daemon=True)
        self._requesting = threading.Lock()
        self._ended = False
        """Whether the loop accepts no more commands."""

    def start(self) -> concurrent.futures.Future[str]:
        """Start; the future has the address, or what kept the engine, the recorder or the port from starting."""
        self.loop = asyncio.new_event_loop()
        self._thread.start()
        return self._ready

    def request(self, command: str, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Run a command, from any thread. Raises CaptureError if the loop has ended."""
        with self._requesting:
            if self._ended:
                why = self._finished.exception() if self._finished.done() else None
                raise CaptureError("the serving thread has ended; start a new server") from why
            return asyncio.run_coroutine_threadsafe(getattr(self._serving, command)(*args, **kwargs), self.loop)

    def stop(self) -> concurrent.futures.Future[None]:
        """End the loop, even in the middle of the start. The future has what was raised while ending."""
        # A closed loop has ended by itself.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self._stop()))
        return self._finished

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                try:
                    runner.run(self._main())
                finally:
                    with self._requesting:
                        self._ended = True
                    # What was requested until now becomes tasks, which the runner cancels as it closes.
                    runner.run(asyncio.sleep(0))
        except BaseException as error:  # noqa: BLE001  the thread's boundary: whoever waits for it raises the error
            if self._ready.done():
                return self._finished.set_exception(error)
            self._ready.set_exception(error)
        self._finished.set_result(None)

    async def _main(self) -> None:
        plan = self._plan
        self._main_task = asyncio.current_task()
        async with contextlib.AsyncExitStack() as stack:
            # The port first: it fails at once, an engine may take minutes.
            listener = stack.enter_context(listen(plan.host, plan.port))
            address = address_of(plan.host, listener.getsockname()[1])
            recorder = plan.recorder()
            stack.callback(recorder.close)
            engine = frozen = await self._started(plan.engine, stack)
            if plan.frozen_start and engine.keeps_start():
                frozen = engine.at(0)
            elif plan.frozen:
                frozen = await self._started(plan.frozen, stack)
            self._app = CaptureApp(
                engine,
                recorder,
                dialects=plan.dialects,
                max_body=plan.max_body,
                trained_nodes=plan.trained_nodes,
                frozen=None if frozen is engine else frozen,
                call_timeout=plan.call_timeout,
            )
            self._serving = Serving(engine, recorder, self._app, address)
            self._server = http_server(self._app)
            serving = asyncio.create_task(self._server.serve(sockets=[listener]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.002)
            self._ready.set_result(address)
            await serving

    async def _started(self, make: Callable[[], Engine], stack: contextlib.AsyncExitStack) -> Any:
        engine = with_defaults(make(), EngineBase)
        if self._plan.folder is not None:
            engine.begin(self._plan.folder)
        await engine.start()
        stack.push_async_callback(engine.stop)
        return engine

    async def _stop(self) -> None:
        if not self._ready.done():
            self._main_task.cancel()
            return
        await self._app.close_all()
        self._server.should_exit = True
