"""Coroutines for callers without an event loop, and blocking functions for callers with one."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from art_core.errors import ConfigError, Terminated, for_waiter

T = TypeVar("T")


def run_alone(function: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any) -> T:
    """Run one of art's public coroutines in its own event loop; ConfigError if one is running already."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise ConfigError(
            f"an event loop is running here (a notebook, for example): use 'await art.{function.__name__}(...)'"
        )
    signals: list[int] = []

    async def until_terminated() -> T:
        with _cancelled_by_sigterm(signals):
            return await function(*args, **kwargs)

    try:
        return asyncio.run(until_terminated())
    except (KeyboardInterrupt, asyncio.CancelledError) as stop:
        # Without the traceback, which only shows where the loop happened to be.
        raise (Terminated if signals else type(stop)) from None


@contextmanager
def _cancelled_by_sigterm(signals: list[int]) -> Iterator[None]:
    """Cancel the current task at SIGTERM and add the signal to ``signals``; the second one raises Terminated at once.

    SIGINT would not do, because background jobs of a shell ignore it. A handler that is already set is left alone.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel(number: int, _: object) -> None:
        signals.append(number)
        if len(signals) > 1:
            raise Terminated
        loop.call_soon_threadsafe(task.cancel)

    signal.signal(signal.SIGTERM, cancel)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is cancel:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def finished(work: Awaitable[T]) -> T:
    """Await ``work``. If cancelled, wait for its end first, so that nothing is left half done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function to its end in its own thread, even if the caller is cancelled.

    The loop's default executor isn't used, because agents' hung sync tools could block it.
    """
    call = partial(function, *arguments)
    return await finished(asyncio.wrap_future(thread_future("art-blocking", call, daemon=False)))


def running_future() -> Future[Any]:
    """Return a future that its waiter can't cancel, so that it can always be set."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def thread_future(name: str, function: Callable[[], T], *, daemon: bool = True) -> Future[T]:
    """Run a function in its own thread, with an empty context; if it hangs in a daemon, the program can still end."""
    future = running_future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  the thread's boundary: the future's waiter raises it
            future.set_exception(for_waiter(error))

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return future
