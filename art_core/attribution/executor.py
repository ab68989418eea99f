"""The executor in which an event loop runs what blocks: sync nodes and tools of agents. Every rollout has places of its own, so
that calls which never return hold up nobody else, and not the end of the process. Knows nothing about what the calls do."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakSet

from art_core.attribution.live import Origin, carried, current_rollout, origin

PLACES = 32
"""Threads of one rollout, as many as asyncio's own executor has at most; what does not belong to a rollout counts as one."""
END_SECONDS = 5.0
"""For what still runs when the loop ends; then it is left behind."""

Work = tuple[Future[Any], Origin, Callable[[], Any]]


class RolloutExecutor(ThreadPoolExecutor):
    """A thread pool by its type alone, which asyncio asks for: threads are daemons and end with their rollout's work."""

    def __init__(self) -> None:
        super().__init__(1)
        self._waiting: dict[str | None, deque[Work]] = {}
        """Rollout that has threads at work -> what waits for one of them."""
        self._threads: dict[str | None, list[threading.Thread]] = {}
        self._changing = threading.Lock()
        self._closed = False

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in a thread of the rollout that this is called in, with what travels along to threads."""
        rollout, future = current_rollout.get(), Future()
        owner = rollout and rollout.rollout_id
        with self._changing:
            if self._closed:
                raise RuntimeError("the event loop has ended, so nothing can be run beside it")
            if len(self._threads.get(owner, ())) < PLACES:
                name = f"tool of rollout {owner}" if owner else "asyncio"
                thread = threading.Thread(target=self._work, args=(owner,), name=name, daemon=True)
                thread.start()  # it waits for what is changed here
                self._threads.setdefault(owner, []).append(thread)
            work = future, origin() or Origin(), functools.partial(function, *args, **kwargs)
            self._waiting.setdefault(owner, deque()).append(work)
        return future

    def _work(self, owner: str | None) -> None:
        while (work := self._next(owner)) is not None:
            future, here, call = work
            if not future.set_running_or_notify_cancel():
                continue
            with carried(here):
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001 - carried to whoever awaits the future
                    future.set_exception(error)
                else:
                    future.set_result(result)

    def _next(self, owner: str | None) -> Work | None:
        with self._changing:
            if waiting := self._waiting[owner]:
                return waiting.popleft()
            self._threads[owner].remove(threading.current_thread())
            if not self._threads[owner]:
                del self._threads[owner], self._waiting[owner]
            return None

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work, and ``wait`` END_SECONDS at most for what runs."""
        with self._changing:
            self._closed = True
            threads = [thread for several in self._threads.values() for thread in several]
            if cancel_futures:
                for waiting in self._waiting.values():
                    while waiting:
                        waiting.popleft()[0].cancel()
        end = time.monotonic() + END_SECONDS
        for thread in threads if wait else ():
            thread.join(max(0.0, end - time.monotonic()))


def rollouts_have_threads() -> None:
    """Make a RolloutExecutor the running loop's default: ``asyncio.to_thread`` and frameworks run there what blocks."""
    loop = asyncio.get_running_loop()
    if loop not in _known:
        loop.set_default_executor(RolloutExecutor())
        _known.add(loop)


_known: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
