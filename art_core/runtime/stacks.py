"""The stacks of all threads and asyncio tasks of this process."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from types import FrameType


def stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    """Return the stacks of all threads and of the tasks of ``loop``, outermost call first. For any thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    threads = [f"thread {names.get(ident, ident)}:\n{_text(thread_frames(ident))}" for ident in sys._current_frames()]
    tasks = asyncio.all_tasks(loop) if loop is not None else ()
    return "\n".join([*threads, *(f"task {task.get_name()}:\n{_text(task_frames(task))}" for task in tasks)])


def thread_frames(ident: int | None) -> list[FrameType]:
    """Return where a thread is, outermost call first; empty if it has ended."""
    frame = sys._current_frames().get(ident)
    return [] if frame is None else [frame for frame, _ in traceback.walk_stack(frame)][::-1]


def task_frames(task: asyncio.Task) -> Iterator[FrameType]:
    """Yield where a task waits: the frame of its coroutine, of what that awaits, and so on."""
    awaited: object = task.get_coro()
    while awaited is not None:
        if frame := _first(awaited, "cr_frame", "gi_frame", "ag_frame"):
            yield frame
        awaited = _first(awaited, "cr_await", "gi_yieldfrom", "ag_await")


def _first(owner: object, *names: str) -> object:
    return next(filter(None, (getattr(owner, name, None) for name in names)), None)


def _text(frames: Iterable[FrameType]) -> str:
    lines = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames).format()
    return "".join(lines) or "  it has no Python code any more\n"
