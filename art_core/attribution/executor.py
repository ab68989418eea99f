"""The executor in which an event loop runs blocking calls, such as the sync nodes and tools of agents.

Every rollout has threads of its own, so that calls that never return delay neither other rollouts nor the end of the process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from weakref import WeakSet

from art_core.attribution.rollouts import current_rollout
from art_core.attribution.workers import carrying
from art_core.errors import for_waiter

THREADS_PER_ROLLOUT = 32
"""As many as asyncio's own executor has at most. Calls outside rollouts share as many."""
END_SECONDS = 5.0
"""How long the end of the event loop waits for running calls before it abandons them."""
_prepared: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def use_rollout_executor() -> None:
    """Make a RolloutExecutor the running loop's default, which ``asyncio.to_thread`` and frameworks use."""
    loop = asyncio.get_running_loop()
    if loop not in _prepared:
        loop.set_default_executor(RolloutExecutor())
        _prepared.add(loop)


class RolloutExecutor(ThreadPoolExecutor):
    """A ThreadPoolExecutor only because asyncio requires one: its threads are daemons that end when no call waits."""

    def __init__(self) -> None:
        super().__init__(1)
        self._lock = threading.Lock()
        self._closed = False
        self._calls: defaultdict[str | None, deque[tuple[Future[Any], Callable[[], Any]]]] = defaultdict(deque)
        self._workers: defaultdict[str | None, set[threading.Thread]] = defaultdict(set)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in a thread of the current rollout."""
        rollout, future = current_rollout.get(), Future()
        owner = rollout and rollout.rollout_id
        with self._lock:
            if self._closed:
                raise RuntimeError("the event loop has ended, so it runs no more calls in threads")
            if len(self._workers[owner]) < THREADS_PER_ROLLOUT:
                name = f"tool of rollout {owner}" if owner else "asyncio"
                thread = threading.Thread(target=self._work, args=(owner,), name=name, daemon=True)
                thread.start()  # it waits for the lock
                self._workers[owner].add(thread)
            self._calls[owner].append((future, partial(carrying(function), *args, **kwargs)))
        return future

    def _work(self, owner: str | None) -> None:
        while True:
            with self._lock:
                if not self._calls[owner]:
                    self._workers[owner].remove(threading.current_thread())
                    if not self._workers[owner]:
                        del self._workers[owner], self._calls[owner]
                    return
                future, call = self._calls[owner].popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
                    future.set_exception(for_waiter(error))

    def shutdown(self, wait: bool = True, **_: Any) -> None:
        """Accept no more calls, and ``wait`` at most END_SECONDS for those that were submitted."""
        with self._lock:
            self._closed = True
            threads = [thread for owned in self._workers.values() for thread in owned]
        end = time.monotonic() + END_SECONDS
        for thread in threads if wait else ():
            thread.join(max(0.0, end - time.monotonic()))
