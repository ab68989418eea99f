"""Says what a run waits for when nothing has ended for a while, and on SIGUSR1 where every thread and task is.

All of it in a thread of its own, because what hangs may be the event loop. It changes nothing and knows nothing about how
what it watches works.
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
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from art_core.capture.activity import Look
from art_core.loop.rollout import Rollout, own_place
from art_core.runtime.memory import Swapping
from art_core.runtime.stacks import stacks, task_frames, thread_frames
from art_core.serving import ServingProxy

T = TypeVar("T")

ANSWER_SECONDS = 5.0
"""That the serving process and the event loop may take to say that they live."""
ORDERS = {
    "pause": "the calls in flight to end, before the weights change",
    "swap": "the engine to take the new weights",
    "close": "the last calls of a rollout to end and to be recorded",
    "flush": "the calls to be written to the disk",
    "score": "the engine to score a fixed text",
}
"""What is waited for while the engine has not done what it was told."""
SWAPPING = 2**20
"""Bytes per second from which a machine swaps: below it, idle programs are put away once."""

log = logging.getLogger("art_core.engine.watchdog")  # below the name whose records a person is shown


@dataclass(frozen=True)
class Doing:
    """Something that has begun and not ended."""

    what: str
    began: float
    task: Any = None
    rollout: Rollout | None = None


class Watchdog:
    """Is told what a run does (``doing``); watches between ``with`` and its end. ``seconds`` None or 0: only SIGUSR1.

    SIGUSR1 is taken on the main thread of a POSIX system, where nobody else has it.
    """

    def __init__(self, run_dir: Path, seconds: float | None) -> None:
        self._run_dir, self._seconds = run_dir, seconds
        self.door: ServingProxy | None = None
        """Set when there is one."""
        self._now: dict[object, Doing] = {}
        self._moved = time.monotonic()
        self._due = seconds or 0.0
        self._counted: Mapping[str, float] | None = None
        self._swapping = Swapping()
        # Of all queues the one that a signal's handler may put into.
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()

    @contextmanager
    def doing(self, what: str, task: Any = None, rollout: Rollout | None = None) -> Iterator[None]:
        """Note that ``what`` is waited for while the block runs."""
        key = object()
        self._now[key] = Doing(what, time.monotonic(), task, rollout)
        try:
            yield
        finally:
            del self._now[key]
            self._moved = time.monotonic()

    async def during(self, what: str, work: Awaitable[T], task: Any = None) -> T:
        """Return what ``work`` gives, ``doing`` it meanwhile."""
        with self.doing(what, task):
            return await work

    def __enter__(self) -> Watchdog:
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        _take_signal(self._orders)
        threading.Thread(target=self._watch, name="art-watchdog", daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        _leave_signal(self._orders)
        self._orders.put("end")

    def _watch(self) -> None:
        pause = min(self._seconds / 4, 30.0) if self._seconds else None
        while (order := self._next(pause)) != "end":
            try:
                self._write_stacks() if order else self._look()
            except Exception:  # the boundary to the run, which must not be touched by who looks at it
                log.debug("the watchdog failed", exc_info=True)

    def _next(self, pause: float | None) -> str:
        try:
            return self._orders.get(timeout=pause)
        except queue.Empty:
            return ""

    def _look(self) -> None:
        assert self._seconds
        swapped = self._swapping.rate()
        doing, orders = list(self._now.values()), list(self.door.pending.values()) if self.door else []
        begun = [it.began for it in doing] + [began for _, began in orders]
        quiet = time.monotonic() - max(self._moved, min(begun, default=time.monotonic()))
        if quiet < self._seconds / 2:
            self._due, self._counted = self._seconds, None
            return
        calls, counted = self.door.look(ANSWER_SECONDS) if self.door else (None, None)
        if counted and self._counted is not None and counted != self._counted:
            self._moved = time.monotonic()  # an engine that is slow, not one that hangs
        self._counted = counted
        if calls is not None:
            self._moved = max(self._moved, time.monotonic() - calls.quiet)
        quiet = min(quiet, time.monotonic() - self._moved)
        if quiet < self._seconds:
            self._due = self._seconds
        elif quiet >= self._due:
            self._due = 2 * quiet
            log.warning(
                "nothing has ended for %s; waited for: %s.%s `kill -USR1 %d` writes the stacks of all threads and tasks to %s",
                _span(quiet), "; ".join(self._waited_for(doing, orders, calls)), _of_swapping(swapped), os.getpid(),
                self._run_dir,
            )  # fmt: skip

    def _waited_for(
        self, doing: Sequence[Doing], orders: Sequence[tuple[str, float]], calls: Look | None
    ) -> Iterator[str]:
        """Yield what is waited for, in the words of a person."""
        if self.door is not None and calls is None:
            yield "the serving process, which does not say what its calls do"
        if place := self._held_at():
            yield f"the event loop, which one piece of code holds, so that nothing else goes on: {place}"
        runs = [it for it in doing if it.rollout is not None]
        if runs:
            yield self._of_runs(runs, calls)
        for what in dict.fromkeys(it.what for it in doing if it.rollout is None):
            several = [it for it in doing if it.what == what]
            if what == PLACE and runs:
                continue  # they wait for these runs
            first = min(several, key=lambda it: it.began)
            count = (
                f" ({len(several)}, the longest for {_span_since(first.began)}"
                if len(several) > 1
                else f" (for {_span_since(first.began)}"
            )
            yield f"{what}{count}{'' if first.task is None else ', ' + _short(first.task)})"
        for order, began in orders:
            if order in ORDERS:
                yield f"{ORDERS[order]} (for {_span_since(began)})"

    def _of_runs(self, runs: Sequence[Doing], calls: Look | None) -> str:
        first = min(runs, key=lambda it: it.began)
        rollout = first.rollout
        when = f"of step {rollout.step}" if rollout.split == "train" else f"of the evaluation after step {rollout.step}"
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - (time.monotonic() - first.began)))
        ended, longest = calls.rollouts.get(rollout.rollout_id, (0, None)) if calls else (0, None)
        said = (
            f"{len(runs)} run{'s' * (len(runs) > 1)} of the agent {when}; the longest goes on since {since}: rollout "
            f"{rollout.rollout_id}, {_short(rollout.task)}"
        )
        if calls is None:
            return said
        said += f", {ended} model call{'s' * (ended != 1)} answered"
        if longest is None:
            at = self._agent_at(rollout)
            return f"{said}, none in flight, so the agent itself is waited for, its tools or its own I/O{at and f', at {at}'}"
        held = f"; {calls.waiting} calls are held back while the weights change" if calls.waiting else ""
        return f"{said}, one in flight for {_span(longest)}, so the engine is waited for{held}"

    def _agent_at(self, rollout: Rollout) -> str:
        """Return the line of the agent's own code at which the run is; empty where that is not seen from here."""
        name = f"rollout {rollout.rollout_id}"
        found = [thread_frames(it.ident) for it in threading.enumerate() if it.name == name]
        found += [task_frames(it) for it in asyncio.all_tasks(self._loop) if it.get_name() == name]
        places = [own_place((frame, frame.f_lineno) for frame in frames) for frames in found]
        return next(filter(None, places), "")

    def _held_at(self) -> str:
        """Return where the event loop's thread is, where the loop does not turn."""
        turned = threading.Event()
        self._loop.call_soon_threadsafe(turned.set)
        if turned.wait(min(ANSWER_SECONDS, self._seconds or ANSWER_SECONDS)):
            return ""
        frames = list(thread_frames(self._loop_thread))
        return (
            own_place((frame, frame.f_lineno) for frame in frames)
            or f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}"
        )

    def _write_stacks(self) -> None:
        ours = stacks(self._loop)
        theirs = self.door.stacks(ANSWER_SECONDS) if self.door else ""
        text = f"process {os.getpid()}\n\n{ours}\n" + (f"\nthe serving process\n\n{theirs}\n" if theirs else "")
        file = self._run_dir / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        with suppress(OSError):  # nobody may be left who reads it
            print(text, file=sys.stderr, flush=True)  # noqa: T201 - where the person looks who has sent the signal
        try:
            file.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            return log.warning("the stacks are above, and could not be written to %s: %s", file, error)
        log.warning("the stacks of all threads and tasks are in %s; the run goes on", file)


PLACE = "a place for a run of the agent: where workers run it, none is there or all are taken"


_asked: list[queue.SimpleQueue[str]] = []
"""Of every run that is open while SIGUSR1 is ours."""


def _ask(number: int, frame: FrameType | None) -> None:
    for orders in _asked:
        orders.put("stacks")


def _take_signal(orders: queue.SimpleQueue[str]) -> None:
    if not hasattr(signal, "SIGUSR1") or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, _ask)
        # At once, also where the main thread is in C code and never comes to the handler above. That thread alone: the frames
        # of others change while they are read here, without the GIL, which may end the process.
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False, chain=True)
    if signal.getsignal(signal.SIGUSR1) is _ask:
        _asked.append(orders)


def _leave_signal(orders: queue.SimpleQueue[str]) -> None:
    if orders not in _asked:
        return
    _asked.remove(orders)
    # Whoever has taken the signal meanwhile keeps it.
    if not _asked and signal.getsignal(signal.SIGUSR1) is _ask:
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def _of_swapping(rate: float) -> str:
    if rate < SWAPPING:
        return ""
    return (
        f" The machine is swapping ({rate / 1e6:.0f} MB/s), so everything is slow: lower max_tokens_per_pass or "
        "max_concurrent, or use a smaller model."
    )


def _short(task: Any) -> str:
    return f"task {reprlib.repr(task)}"


def _span_since(began: float) -> str:
    return _span(time.monotonic() - began)


def _span(seconds: float) -> str:
    """Return a time as ``40 s``, ``5 min`` or ``3.2 h``."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
