"""Work that blocks, beside an event loop, and work that needs one where there is none. Knows nothing about what the work is."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from art_core.errors import ConfigError

T = TypeVar("T")


def run_alone(function: Callable[..., Coroutine[Any, Any, T]], *args: Any, **kwargs: Any) -> T:
    """Run one of art's public coroutines in an event loop of its own; ConfigError where one runs already."""
    if _loop_runs():
        name = f"art.{function.__name__}"
        raise ConfigError(f"an event loop is running here (a notebook, for example): use 'await {name}(...)'")
    asked: list[int] = []

    async def until_terminated() -> T:
        with _terminated_in_good_order(asked):
            return await function(*args, **kwargs)

    try:
        return asyncio.run(until_terminated())
    except (KeyboardInterrupt, asyncio.CancelledError) as stop:
        # Where the loop was when it came says nothing.
        raise (Terminated if asked else type(stop)) from None


class Terminated(KeyboardInterrupt):
    """SIGTERM came: what was under way has been ended in good order, as after Ctrl-C."""


@contextmanager
def _terminated_in_good_order(asked: list[int]) -> Iterator[None]:
    """Cancel the task that is inside where SIGTERM comes, and note it; the second one is raised at once.

    Not by way of SIGINT, which background jobs of a shell ignore. Whoever handles SIGTERM otherwise goes on to.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def end(number: int, _: object) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise Terminated
        loop.call_soon_threadsafe(task.cancel)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def finished(work: Awaitable[T]) -> T:
    """Await ``work``; when cancelled, wait for its end first, so that nothing is left half done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a thread of its own to its end, also where the caller is cancelled meanwhile.

    Not in the loop's default executor: agents' sync tools that hang there would keep the learner waiting for ever.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="art-learner")
    try:
        return await finished(asyncio.get_running_loop().run_in_executor(executor, function, *arguments))
    finally:
        executor.shutdown(wait=False)
