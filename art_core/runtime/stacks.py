"""Where every thread and every asyncio task of this process is. Knows nothing about what they do."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType


def stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    """Return the stacks of all threads, and of all tasks of ``loop``, the outermost call first; for any thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{_shown(_above(frame))}" for ident, frame in sys._current_frames().items()
    ]
    parts += (
        [] if loop is None else [f"task {it.get_name()}:\n{_shown(task_frames(it))}" for it in asyncio.all_tasks(loop)]
    )
    return "\n".join(parts)


def task_frames(task: asyncio.Task) -> Iterator[FrameType]:
    """Yield where a task waits: its coroutine, what that awaits, and so on, to the innermost that can be seen."""
    waits: object = task.get_coro()
    while waits is not None:
        frame = next(filter(None, (getattr(waits, name, None) for name in ("cr_frame", "gi_frame", "ag_frame"))), None)
        if frame is not None:
            yield frame
        waits = next(
            filter(None, (getattr(waits, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await"))), None
        )


def thread_frames(ident: int | None) -> Iterator[FrameType]:
    """Yield where a thread is, the outermost call first; nothing where it has ended."""
    frame = sys._current_frames().get(ident) if ident else None
    yield from _above(frame) if frame else ()


def _above(frame: FrameType | None) -> list[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _shown(frames: Iterable[FrameType]) -> str:
    found = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
    return "".join(found.format()) or "  it has no Python code any more\n"
