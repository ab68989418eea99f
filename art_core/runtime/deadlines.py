"""Time limits that hold, also for work that ignores its cancellation or keeps its thread. Knows nothing about the work."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

GRACE = 5.0
"""Seconds that cancelled work has to end; it is then left behind, because nothing else can end it."""
_until: ContextVar[float | None] = ContextVar("art_until", default=None)


class TooLate(BaseException):
    """The time is over. No Exception, so that the work which it ends does not take it for a failure of its own."""


async def within(work: Coroutine[Any, Any, T], seconds: float | None, name: str | None = None) -> T:
    """Return what ``work`` returns, in a task called ``name``; TooLate where it takes longer than ``seconds``. None: no limit.

    When this or its caller is over, so is the work, but for work that goes on ``GRACE`` seconds after it was cancelled.
    """
    token = _until.set(None if seconds is None else time.monotonic() + seconds)
    task = asyncio.create_task(work, name=name)
    _until.reset(token)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
    finally:
        await ended(task)
    raise TooLate


async def ended(task: asyncio.Future[Any], grace: float = GRACE) -> bool:
    """Cancel ``task`` and say whether that has ended it within ``grace`` seconds; what it raises from now on is nobody's."""
    task.add_done_callback(lambda it: it.cancelled() or it.exception())
    if task.cancel():
        await asyncio.wait({task}, timeout=grace)
    return task.done()


@contextmanager
def interrupted() -> Iterator[None]:
    """Raise TooLate inside the block when the time of the ``within`` around it is over: for calls that hold the event loop.

    By the alarm signal, so on the main thread of a POSIX system only, and only where nobody else uses the alarm. A function
    in a thread could not be ended either, and many that run other people's programs set alarms of their own.
    """
    until = _until.get()
    if until is None or not _alarm_is_free():
        yield
        return
    armed = True

    def raise_too_late(number: int, frame: FrameType | None) -> None:
        if armed:
            raise TooLate

    signal.signal(signal.SIGALRM, raise_too_late)
    # Again and again: what is raised where a C function calls Python may be lost.
    signal.setitimer(signal.ITIMER_REAL, max(until - time.monotonic(), 1e-3), 1.0)
    try:
        try:
            yield
        finally:
            armed = False
    finally:  # the alarm may come between the block's end and the line above, but not in here
        if signal.getsignal(signal.SIGALRM) is raise_too_late:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _alarm_is_free() -> bool:
    return (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
        and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    )
