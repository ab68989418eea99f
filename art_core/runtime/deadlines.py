"""Time limits that also hold for work that ignores its cancellation or blocks its thread."""

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

from art_core.errors import TooLate

T = TypeVar("T")

GRACE = 5.0
"""Seconds that cancelled work has to end. It is then abandoned, because nothing else can end it."""
_until: ContextVar[float | None] = ContextVar("art_until", default=None)


async def within(work: Coroutine[Any, Any, T], seconds: float | None, name: str | None = None) -> T:
    """Return the result of ``work``, run in a task called ``name``. Raises TooLate after ``seconds``; None: no limit.

    The work is cancelled when its time or its caller ends, and abandoned ``GRACE`` seconds later: what it then raises is
    discarded.
    """
    token = _until.set(None if seconds is None else time.monotonic() + seconds)
    task = asyncio.create_task(work, name=name)
    _until.reset(token)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
    finally:
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        if task.cancel():
            await asyncio.wait({task}, timeout=GRACE)
    raise TooLate


@contextmanager
def interrupted() -> Iterator[None]:
    """Raise TooLate inside the block when the time of the surrounding ``within`` is over: for calls that block the event
    loop.

    It uses the alarm signal, so it works on the main thread of a POSIX system only, and only if nobody else uses the alarm.
    A function in a thread couldn't be ended either, and many that run other people's programs set alarms of their own.
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
    # Repeated, because an exception in a callback from C code may be lost.
    signal.setitimer(signal.ITIMER_REAL, max(until - time.monotonic(), 1e-3), 1.0)
    try:
        try:
            yield
        finally:
            armed = False
    finally:  # an alarm between the block and the line above raises too, but none does from here on
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
