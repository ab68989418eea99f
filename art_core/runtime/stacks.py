"""The stacks of all threads and asyncio tasks of this process: frames with their lines, outermost call first."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from types import FrameType

Stack = list[tuple[FrameType, int]]


def stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    """Return the stacks of all threads, and of the tasks of ``loop``, as text. For any thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    named = [(f"thread {names.get(ident, ident)}", thread_stack(ident)) for ident in sys._current_frames()]
    tasks = asyncio.all_tasks(loop) if loop else ()
    named += [(f"task {task.get_name()}", task_stack(task)) for task in tasks]
    return "\n".join(f"{name}:\n{_text(stack)}" for name, stack in named)


def thread_stack(ident: int | None) -> Stack:
    """Return a thread's stack; empty if it has ended."""
    return list(traceback.walk_stack(frame))[::-1] if (frame := sys._current_frames().get(ident)) else []


def task_stack(task: asyncio.Task) -> Stack:
    """Return where a task waits: its coroutine, what that awaits, and so on."""
    stack, awaited = [], task.get_coro()
    while awaited is not None:
        if frame := _first(awaited, "cr_frame", "gi_frame", "ag_frame"):
            stack.append((frame, frame.f_lineno))
        awaited = _first(awaited, "cr_await", "gi_yieldfrom", "ag_await")
    return stack


def _first(owner: object, *names: str):
    return next(filter(None, (getattr(owner, name, None) for name in names)), None)


def _text(stack: Stack) -> str:
    return "".join(traceback.StackSummary.extract(stack).format()) or "  no Python code\n"
