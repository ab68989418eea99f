"""The thread whose event loop runs the engine, the recorder and the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import quote

from art_core.capture.admission import CallsSnapshot
from art_core.capture.listening import address_of, http_server, listen
from art_core.capture.server import CaptureApp
from art_core.errors import CaptureError
from art_core.runtime.threads import running_future, thread_future
from art_core.types import Call, Engine, EngineBase, Recorder, Sampling, Weights, with_defaults


class Serving:
    """The commands, as methods that run in the loop that answers the calls. ``ServingProxy`` sends them there."""

    def __init__(self, engine: Any, recorder: Recorder, app: CaptureApp, address: str) -> None:
        self._engine, self._recorder, self._app, self._address = engine, recorder, app, address
        self._swapping = asyncio.Lock()
        self._resting = False
        self._newest = 0
        self._loaded = {0}
        """Versions that aren't retired."""
        self._began_with: dict[str, int] = {}
        """The version of every open rollout that doesn't follow the newest one."""

    async def open(
        self, rollout_id: str, sampling: Sampling | None = None, *, newest: bool = False, replayed: Sequence[Call] = ()
    ) -> str:
        """Answer a rollout's calls from now on and return its base URL, for any OpenAI-compatible client.

        With ``newest``, every call is answered with the newest weights, even if the engine could keep serving those
        that the rollout began with; for addresses that outlive a step. ``replayed`` has the calls of an interrupted
        rollout: the same requests get the same answers again, each once.
        """
        upstream = None if newest else self._engine.at(self._newest)
        self._app.open(rollout_id, sampling or Sampling(), upstream, replayed)
        if not newest:
            self._began_with[rollout_id] = self._newest
        return f"{self._address}/rollouts/{quote(rollout_id, safe='')}/v1"

    async def close(self, rollout_id: str, grace: float = 1.0) -> Mapping[str, int]:
        """Refuse further calls of a rollout, and return the counts of its error answers once its calls are on disk.

        Calls in flight are aborted after ``grace`` seconds. Raises StoreError if the calls can't be written.
        """
        failed = await self._app.close(rollout_id, grace)
        self._began_with.pop(rollout_id, None)
        await self._retire_unused()
        await self.flush()
        return failed

    async def flush(self) -> None:
        """Return when every answered call is on disk. Raises StoreError if the calls can't be written."""
        await asyncio.to_thread(self._recorder.flush)

    async def pause(self, *, rest: bool = False) -> None:
        """Hold new calls, and return when none is in flight. With ``rest``, the engine may release memory until the
        next ``swap`` or ``resume``."""
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
        """Serve these weights to new calls or, if the engine serves several versions, to new rollouts. Calls in flight
        finish with the old weights; paused calls stay paused. Return ``score(probe)`` under the new weights."""
        async with self._swapping:
            await self._wake()
            async with contextlib.nullcontext() if self._engine.overlaps(weights) else self._app.gate.held():
                await self._engine.load(weights)
            self._newest = weights.version
            self._loaded.add(weights.version)
            await self._retire_unused()
        return await self.score(probe)

    async def score(self, ids: Sequence[int]) -> list[float] | None:
        """Return what ``EngineBase.score`` returns; None for no ids or if the engine can't score."""
        return await self._engine.score(ids) if ids else None

    async def counters(self) -> Mapping[str, float]:
        """Return what ``EngineBase.counters`` returns."""
        return dict(await self._engine.counters())

    async def activity(self) -> CallsSnapshot:
        """Return the state of all calls at this moment."""
        return self._app.activity.snapshot(self._app.gate)

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

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._ready: Future[str] = running_future()
        self._serving: Serving | None = None
        """None once the loop accepts no more commands."""
        self._requesting = threading.Lock()

    def start(self, *args: Any, **kwargs: Any) -> Future[str]:
        """Start what ``ServingProxy.start`` describes. The future's result is the address."""
        self._finished = thread_future("art-capture", lambda: self._run(*args, **kwargs))
        return self._ready

    def request(self, command: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a command, from any thread. Raises CaptureError if the loop has ended."""
        with self._requesting:
            if self._serving is None:
                why = self._finished.exception() if self._finished.done() else None
                raise CaptureError("the serving thread has ended; start a new server") from why
            return asyncio.run_coroutine_threadsafe(getattr(self._serving, command)(*args, **kwargs), self.loop)

    def stop(self) -> Future[None]:
        """Stop everything, even during the start. The future raises what was raised while stopping."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self.loop.call_soon_threadsafe(lambda: self.loop.create_task(self._stop()))
        return self._finished

    def _run(self, *args: Any, **kwargs: Any) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                try:
                    runner.run(self._main(*args, **kwargs))
                finally:
                    with self._requesting:
                        self._serving = None
                    # Turns the last requests into tasks, which the runner cancels when it closes.
                    runner.run(asyncio.sleep(0))
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _main(
        self,
        make_engine: Callable[[], Engine],
        make_recorder: Callable[[], Recorder],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        folder: Path | None = None,
        frozen: Callable[[], Engine] | None = None,
        frozen_start: bool = False,
        **capture: Any,
    ) -> None:
        self._main_task = asyncio.current_task()
        async with contextlib.AsyncExitStack() as stack:

            async def started(make: Callable[[], Engine]) -> Any:
                engine = with_defaults(make(), EngineBase)
                if folder is not None:
                    engine.begin(folder)
                await engine.start()
                stack.push_async_callback(engine.stop)
                return engine

            # The port comes first, because it fails at once; an engine may take minutes.
            listener = stack.enter_context(listen(host, port))
            address = address_of(host, listener.getsockname()[1])
            recorder = make_recorder()
            stack.callback(recorder.close)
            engine = await started(make_engine)
            if frozen_start and engine.keeps_start():
                capture["frozen"] = engine.at(0)
            elif frozen:
                capture["frozen"] = await started(frozen)
            self._app = CaptureApp(engine, recorder, **capture)
            self._serving = Serving(engine, recorder, self._app, address)
            self._server = http_server(self._app)
            serving = asyncio.create_task(self._server.serve(sockets=[listener]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.002)
            self._ready.set_result(address)
            await serving

    async def _stop(self) -> None:
        if not self._ready.done():
            self._main_task.cancel()
            return
        await self._app.close_all()
        self._server.should_exit = True
