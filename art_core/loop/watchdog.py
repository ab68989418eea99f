"""Logs what a run waits for if nothing ends for a while, and writes the stacks of all threads and tasks on SIGUSR1.

It runs in its own thread, because the event loop may be what hangs, and only observes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import queue
import reprlib
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from art_core.loop.display import plural
from art_core.loop.own_code import own_place
from art_core.loop.rollout import Rollout
from art_core.runtime.memory import swapped_bytes
from art_core.runtime.stacks import stacks, task_stack, thread_stack
from art_core.serving import CallsSnapshot, ServingProxy

T = TypeVar("T")

ANSWER_SECONDS = 5.0
"""How long the serving process and the event loop may take to show that they are alive."""
FREE_WORKER = "a free worker"
COMMANDS = {
    "open": "the engine to open a rollout",
    "pause": "calls in flight to end before the weights change",
    "swap": "the engine to load the new weights",
    "close": "the last calls of a rollout to end and to be recorded",
    "flush": "calls to be written to disk",
    "score": "the engine to score a fixed text",
}
"""What an unanswered command to the engine waits for."""
SWAPPING = 2**20
"""Bytes per second from which a machine counts as swapping; idle programs, swapped out once, cause less."""
SWAPPING_ADVICE = (
    " The machine is swapping ({:.0f} MB/s), so everything is slow: lower max_tokens_per_pass or max_concurrent, or use a "
    "smaller model."
)

log = logging.getLogger("art_core.engine.watchdog")  # a child of the logger whose records are displayed


@dataclass(frozen=True, eq=False)
class PendingWork:
    """Something that has begun and not ended."""

    name: str
    began: float
    task: Any = None
    rollout: Rollout | None = None


class Watchdog:
    """Watches a run while it is entered. With ``seconds`` None or 0, it only answers SIGUSR1.

    SIGUSR1 needs the main thread of a POSIX system; a handler that is already set is left alone.
    """

    def __init__(self, run_dir: Path, seconds: float | None) -> None:
        self._run_dir, self._seconds = run_dir, seconds or 0.0
        self.serving: ServingProxy | None = None
        """To be set once the engine is served."""
        self._activities: list[PendingWork] = []
        self._progress_at = time.monotonic()
        self._warn_after = self._seconds
        self._counters: Mapping[str, float] | None = None
        self._swapped = swapped_bytes(), time.monotonic()
        # A SimpleQueue, because its put() may be called in a signal handler.
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    @contextmanager
    def doing(self, name: str, task: Any = None, rollout: Rollout | None = None) -> Iterator[None]:
        """Note that the run waits for ``name`` during the block."""
        activity = PendingWork(name, time.monotonic(), task, rollout)
        self._activities.append(activity)
        try:
            yield
        finally:
            self._activities.remove(activity)
            self._progress_at = time.monotonic()

    async def during(self, name: str, work: Awaitable[T], task: Any = None) -> T:
        """Return the result of ``work``, noting that the run waits for ``name``."""
        with self.doing(name, task):
            return await work

    def __enter__(self) -> Watchdog:
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        _handle_signal(self)
        threading.Thread(target=self._watch, name="art-watchdog", daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        _release_signal(self)
        self._requests.put(None)

    def _watch(self) -> None:
        pause = min(self._seconds / 4, 30.0) or None
        while True:
            try:
                action = self._requests.get(timeout=pause)
            except queue.Empty:
                action = self._check
            if action is None:
                return
            try:
                action()
            except Exception:  # an observer must not disturb the run
                log.debug("the watchdog failed", exc_info=True)

    def request_stacks(self) -> None:
        """Have the stacks written soon. May be called in a signal handler."""
        self._requests.put(self._write_stacks)

    def _check(self) -> None:
        advice = self._swapping_advice()
        activities = list(self._activities)
        calls = counters = None
        if self.serving:
            commands = list(self.serving.pending.values())
            activities += [PendingWork(COMMANDS[name], began) for name, began in commands if name in COMMANDS]
            if activities:
                calls, counters = self.serving.snapshot(ANSWER_SECONDS)
        now = time.monotonic()
        if counters and self._counters not in (None, counters):
            self._progress_at = now  # the engine computes, however slowly
        self._counters = counters
        if calls is not None:
            self._progress_at = max(self._progress_at, now - calls.quiet)
        quiet = now - max(self._progress_at, min((activity.began for activity in activities), default=now))
        if quiet < self._seconds:
            self._warn_after = self._seconds
        elif quiet >= self._warn_after:
            self._warn_after = 2 * quiet
            log.warning(
                "no progress for %s; waiting for %s.%s `kill -USR1 %d` writes the stacks of all threads and tasks to %s",
                _duration(quiet), "; ".join(self._reasons(activities, calls)), advice, os.getpid(), self._run_dir,
            )  # fmt: skip

    def _swapping_advice(self) -> str:
        (before, then), self._swapped = self._swapped, (swapped_bytes(), time.monotonic())
        rate = (self._swapped[0] - before) / max(self._swapped[1] - then, 1e-3)
        return SWAPPING_ADVICE.format(rate / 1e6) if rate >= SWAPPING else ""

    def _reasons(self, activities: Sequence[PendingWork], calls: CallsSnapshot | None) -> Iterator[str]:
        """Yield what the run waits for."""
        if self.serving is not None and calls is None:
            yield "the serving process, which does not answer"
        if place := self._blocked_at():
            yield f"the event loop, which is blocked at {place}"
        rollouts = [activity for activity in activities if activity.rollout is not None]
        if rollouts:
            yield _describe_rollouts(rollouts, calls, self._agent_at(rollouts[0].rollout.rollout_id))
        for name in dict.fromkeys(activity.name for activity in activities if activity.rollout is None):
            if name == FREE_WORKER and rollouts:
                continue  # these rollouts have the workers
            oldest, *others = [activity for activity in activities if activity.name == name]
            count = f"{1 + len(others)}, the longest " if others else ""
            task = "" if oldest.task is None else f", task {reprlib.repr(oldest.task)}"
            yield f"{name} ({count}for {_duration(time.monotonic() - oldest.began)}{task})"

    def _agent_at(self, rollout_id: str) -> str:
        """Return the line of the agent's own code that a rollout is at; empty if this process can't see it."""
        name = f"rollout {rollout_id}"
        stacks = [thread_stack(thread.ident) for thread in threading.enumerate() if thread.name == name]
        stacks += [task_stack(task) for task in asyncio.all_tasks(self._loop) if task.get_name() == name]
        return next(filter(None, map(own_place, stacks)), "")

    def _blocked_at(self) -> str:
        """Return the line that blocks the event loop; empty if the loop runs."""
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        if turned.wait(min(ANSWER_SECONDS, self._seconds)):
            return ""
        stack = thread_stack(self._loop_thread)
        return own_place(stack) or f"{stack[-1][0].f_code.co_filename}:{stack[-1][1]}"

    def _write_stacks(self) -> None:
        text = f"process {os.getpid()}\n\n{stacks(self._loop)}\n"
        if self.serving and (serving := self.serving.stacks(ANSWER_SECONDS)):
            text += f"\nthe serving process\n\n{serving}\n"
        file = self._run_dir / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        with suppress(OSError):  # nobody may read stderr any more
            print(text, file=sys.stderr, flush=True)  # noqa: T201 - who sent the signal looks here
        try:
            file.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            return log.warning("the stacks are above; can't write them to %s: %s", file, error)
        log.warning("the stacks of all threads and tasks are in %s; the run continues", file)


_listeners: list[Watchdog] = []
"""The watchdogs of all open runs, while we handle SIGUSR1."""


def _on_signal(number: int, frame: FrameType | None) -> None:
    for watchdog in _listeners:
        watchdog.request_stacks()


def _handle_signal(watchdog: Watchdog) -> None:
    if not hasattr(signal, "SIGUSR1") or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _on_signal)
        # Prints at once, even if the main thread is in C code and doesn't reach the handler above. That thread only:
        # reading the frames of running threads without the GIL may crash the process.
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False, chain=True)
    if signal.getsignal(signal.SIGUSR1) is _on_signal:
        _listeners.append(watchdog)


def _release_signal(watchdog: Watchdog) -> None:
    if watchdog in _listeners:
        _listeners.remove(watchdog)
        if not _listeners and signal.getsignal(signal.SIGUSR1) is _on_signal:  # else the user has replaced it
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def _describe_rollouts(activities: Sequence[PendingWork], calls: CallsSnapshot | None, agent_at: str) -> str:
    """Describe the rollouts under way, and whether the oldest waits for its agent or for the engine."""
    oldest, rollout = activities[0], activities[0].rollout
    when = f"step {rollout.step}" if rollout.split == "train" else f"the evaluation after step {rollout.step}"
    text = (
        f"{plural(len(activities), 'rollout')} of {when}, the oldest for {_duration(time.monotonic() - oldest.began)}: "
        f"{rollout.rollout_id}, task {reprlib.repr(rollout.task)}"
    )
    if calls is None:
        return text
    answered, longest = calls.rollouts.get(rollout.rollout_id, (0, None))
    text += f", {plural(answered, 'model call')} answered, "
    if longest is None:
        place = f" at {agent_at}" if agent_at else ""
        return f"{text}none in flight: the agent itself is busy (its tools, its own I/O){place}"
    paused = f"; {plural(calls.waiting, 'call')} held back while the weights change" if calls.waiting else ""
    return f"{text}one in flight for {_duration(longest)}: the engine has not answered{paused}"


def _duration(seconds: float) -> str:
    """Return a time as ``40 s``, ``5 min`` or ``3.2 h``."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
