"""A proxy for ``Serving``: its commands run in the event loop that answers the calls, in a thread or a child process."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from art_core.capture.admission import CallsSnapshot
from art_core.errors import CaptureError
from art_core.serving.process import ServingProcess, early_or_new
from art_core.serving.service import Serving, ServingThread
from art_core.types import Engine, Recorder

P = ParamSpec("P")
T = TypeVar("T")


def _command(
    method: Callable[Concatenate[Serving, P], Awaitable[T]],
) -> Callable[Concatenate[ServingProxy, P], Awaitable[T]]:
    @functools.wraps(method)
    async def command(self: ServingProxy, *args: P.args, **kwargs: P.kwargs) -> T:
        name = method.__name__
        if self._stopped is not None:
            raise CaptureError(f"cannot {name}: this server was stopped; start a new one")
        key = object()
        self.pending[key] = name, time.monotonic()
        try:
            return await _await_reply(self._timeout, name, self._server.request(name, *args, **kwargs))
        finally:
            del self.pending[key]

    return command


class ServingProxy:
    """Sends commands to the policy server: ``async with await ServingProxy.start(...) as serving``, or call ``stop`` yourself.

    Every command raises CaptureError if it takes longer than ``timeout``, or if the serving process has died.
    """

    open = _command(Serving.open)
    close = _command(Serving.close)
    flush = _command(Serving.flush)
    pause = _command(Serving.pause)
    resume = _command(Serving.resume)
    swap = _command(Serving.swap)
    score = _command(Serving.score)
    counters = _command(Serving.counters)

    def __init__(self, server: ServingThread | ServingProcess, address: str, timeout: float | None) -> None:
        self._server, self._timeout = server, timeout
        self.pending: dict[object, tuple[str, float]] = {}
        """Each command in flight: its name and when it was sent (``time.monotonic``)."""
        self._stopped: Future[None] | None = None
        self.address = address
        """``http://HOST:PORT``."""

    @classmethod
    async def start(
        cls,
        engine: Callable[[], Engine],
        recorder: Callable[[], Recorder],
        *,
        process: bool = True,
        timeout: float | None = None,
        **settings: Any,
    ) -> ServingProxy:
        """Start the engine and answer calls.

        With ``process``, a child process serves, and everything passed here is pickled, functions and classes by the
        name of their module; else a thread of this process does. ``timeout`` is in seconds, for the start and for each
        command. The settings:

        - ``host`` ("127.0.0.1"): an address of this machine that the agents can reach. Anyone who knows a rollout's
          address can call the policy. ``port``: 0, the default, picks a free one.
        - ``folder``: where the engine may write files.
        - ``frozen``: a factory for the engine that answers the calls of nodes other than ``trained_nodes``.
          ``frozen_start``: that engine serves the policy's start weights, so it isn't started if ``engine`` keeps
          those.
        - ``trained_nodes``, ``dialects``, ``max_body`` and ``call_timeout``: as for ``CaptureApp``.

        Raises what the factories or the engine's start raise, ConfigError if the port is taken, and CaptureError if the
        process can't be started or the start takes too long.
        """
        server = early_or_new() if process else ServingThread()
        try:
            address = await _await_reply(timeout, "start", server.start(engine, recorder, **settings))
            return cls(server, address, timeout)
        except BaseException:
            # What stopping raises must not replace this error.
            await asyncio.shield(asyncio.gather(asyncio.wrap_future(server.stop()), return_exceptions=True))
            raise

    async def stop(self) -> None:
        """Abort calls in flight, stop the engine and close the recorder; nothing is left running. May be called
        again."""
        if self._stopped is None:
            self._stopped = self._server.stop()
        await asyncio.shield(asyncio.wrap_future(self._stopped))

    async def __aenter__(self) -> ServingProxy:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def snapshot(self, seconds: float) -> tuple[CallsSnapshot | None, Mapping[str, float] | None]:
        """Return the state of all calls and ``counters``, each None if it takes longer than ``seconds``. For any thread
        but the loop's."""
        return self._try_request(seconds, "activity"), self._try_request(seconds, "counters")

    def stacks(self, seconds: float) -> str:
        """Return the stacks of the child process's threads and tasks; empty without a child. For any thread."""
        if not isinstance(self._server, ServingProcess):
            return ""
        return self._try_request(seconds, "stacks") or f"no answer within {seconds:g} seconds"

    def _try_request(self, seconds: float, command: str) -> Any:
        with suppress(CaptureError, TimeoutError):
            return self._server.request(command).result(seconds)


async def _await_reply(seconds: float | None, command: str, future: Future[T]) -> T:
    """Return the future's result. Raises CaptureError if it takes longer than ``seconds``."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await asyncio.wrap_future(future)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise CaptureError(
            f"the engine did not finish {command!r} within {seconds:g} seconds (engine_timeout); everything up to the "
            "last checkpoint is kept: train again with the same run_dir to resume"
        ) from error
