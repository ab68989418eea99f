"""The door as the agents' process holds it: starts what serves and gives it orders.

Knows nothing about HTTP or pipes. torch is imported only to send weights that live in shared memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from art_core.capture.admission import Look
from art_core.capture.server import Dialect
from art_core.errors import CaptureError
from art_core.serving.process import ServingProcess
from art_core.serving.service import Serving, ServingPlan
from art_core.types import Call, Engine, Recorder, Sampling, Weights


class Door:
    """Every rollout's address. ``async with await Door.start(...) as door``, or call ``stop`` yourself."""

    def __init__(self, serving: Serving | ServingProcess, address: str, timeout: float | None = None) -> None:
        self._serving = serving
        self._timeout = timeout
        self.asked: dict[object, tuple[str, float]] = {}
        """Orders that have not been answered yet, and since when (``time.monotonic``)."""
        self._stopped: concurrent.futures.Future[None] | None = None
        self.address = address
        """``http://HOST:PORT``."""

    @classmethod
    async def start(
        cls,
        engine: Callable[[], Engine],
        recorder: Callable[[], Recorder],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        process: bool = True,
        dialects: Mapping[str, Dialect] | None = None,
        max_body: int = 64 * 2**20,
        trained_nodes: Sequence[str] = (),
        frozen: Callable[[], Engine] | None = None,
        frozen_start: bool = False,
        folder: Path | None = None,
        call_timeout: float | None = None,
        timeout: float | None = None,
    ) -> Door:
        """Start the engine, and answer on ``host`` and ``port`` (0 takes a free one).

        With ``process`` a child process serves; the two factories and the dialects then travel to it and must be picklable
        by module name. Without, a thread of this process does, for tests. ``host`` must be an address of this machine that
        the agents can reach; whoever knows a rollout's address can call the policy. ``max_body`` is a request's, in bytes.
        ``frozen`` answers the calls of nodes other than ``trained_nodes``; None: the engine does. With ``frozen_start`` it has
        the engine's start weights, and is not needed where the engine keeps those. ``folder`` is where an engine
        may keep files. ``call_timeout`` is for a model call, in seconds, ``timeout`` for the start and for every order.

        Raises what the factories or the engine's start raise, ConfigError where the port is taken, and CaptureError
        where the process cannot be started or the start takes too long.
        """
        plan = ServingPlan(
            engine,
            recorder,
            host,
            port,
            dict(dialects or {}),
            max_body,
            tuple(trained_nodes),
            frozen,
            frozen_start,
            folder,
            call_timeout,
        )
        serving = ServingProcess(plan) if process else Serving(plan)
        try:
            address = await _answer("start", serving.start(), timeout)
        except BaseException:
            # What made the start fail is what is raised, whatever stopping adds to it.
            await asyncio.shield(asyncio.gather(asyncio.wrap_future(serving.stop()), return_exceptions=True))
            raise
        return cls(serving, address, timeout)

    async def open(
        self, rollout_id: str, sampling: Sampling | None = None, *, newest: bool = False, answered: Sequence[Call] = ()
    ) -> str:
        """Answer a rollout's calls from now on and return its base URL, for any OpenAI-compatible client.

        ``newest`` answers every call with the newest weights, also where the engine would go on with those that the rollout
        began with: for an address that outlives steps. ``answered`` are calls of a rollout that was cut off: what was asked in
        them gets the same answer again, each once.
        """
        await self._ask("open", rollout_id, sampling or Sampling(), newest, tuple(answered))
        return f"{self.address}/rollouts/{quote(rollout_id, safe='')}/v1"

    async def close(self, rollout_id: str, grace: float = 1.0) -> Mapping[str, int]:
        """Refuse further calls of a rollout; return when all it made are on disk, with the errors that it was answered with.

        Calls in flight get ``grace`` seconds to end, then they are aborted. Raises StoreError where they cannot be written.
        """
        return await self._ask("close", rollout_id, grace)

    async def flush(self) -> None:
        """Return when every call that was answered is on disk. Raises StoreError where they cannot be written."""
        await self._ask("flush")

    async def pause(self) -> None:
        """Hold new calls; return when none is in flight."""
        await self._ask("pause")

    async def resume(self) -> None:
        """Let the calls go on that ``pause`` holds."""
        await self._ask("resume")

    async def load(self, weights: Weights) -> None:
        """Serve these weights from the next call on, or where the engine serves several versions to the rollouts that are
        opened from now on. Calls in flight end with the old ones."""
        if weights.live:
            # Teaches multiprocessing's pickler to send shared-memory tensors as handles.
            importlib.import_module("torch.multiprocessing")
        await self._ask("load", weights)

    async def score(self, ids: Sequence[int]) -> list[float] | None:
        """Return what ``abilities.Scores`` promises; None where the engine has not this ability."""
        return await self._ask("score", list(ids))

    async def counters(self) -> Mapping[str, float]:
        """Return what ``abilities.Counts`` promises; empty where the engine has not this ability."""
        return await self._ask("counters")

    async def rest(self) -> None:
        """Let the engine give back memory until ``wake``. While paused only."""
        await self._ask("rest")

    async def wake(self) -> None:
        await self._ask("wake")

    async def stop(self) -> None:
        """Abort what is in flight, stop the engine, close the recorder and leave nothing running. Again is harmless."""
        if self._stopped is None:
            self._stopped = self._serving.stop()
        await asyncio.shield(asyncio.wrap_future(self._stopped))

    async def __aenter__(self) -> Door:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def _ask(self, order: str, *args: object) -> Any:
        if self._stopped is not None:
            raise CaptureError(f"cannot {order}: this door was stopped; start a new one")
        key = object()
        self.asked[key] = order, time.monotonic()
        try:
            return await _answer(order, self._serving.ask(order, *args), self._timeout)
        finally:
            del self.asked[key]

    def look(self, seconds: float) -> tuple[Look | None, Mapping[str, float] | None]:
        """Return what the calls do, and what ``counters`` does; None for what is not known within so many ``seconds``.

        For any thread but the loop's.
        """
        return self._known(seconds, "look"), self._known(seconds, "counters")

    def stacks(self, seconds: float) -> str:
        """Return where the threads and tasks of the process that serves are, empty where that is this one. For any thread."""
        if not isinstance(self._serving, ServingProcess):
            return ""
        return self._known(seconds, "stacks") or f"it did not say within {seconds:g} seconds"

    def _known(self, seconds: float, order: str) -> Any:
        with suppress(CaptureError, TimeoutError):
            return self._serving.ask(order).result(seconds)


async def _answer(order: str, future: concurrent.futures.Future, seconds: float | None) -> Any:
    """Return what the future gives; CaptureError where that takes longer."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await asyncio.wrap_future(future)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise CaptureError(
            f"the engine had not done what it was told ({order}) after {seconds:g} seconds (engine_timeout); everything up to "
            "the last checkpoint is kept: start again with the same run folder to go on"
        ) from error
