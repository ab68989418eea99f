"""Work for later steps that begins while earlier steps are trained.

Work for step s begins once step s - depth is requested, and the caller requests a step only when all before it are done.
So at most ``depth`` steps are done between the beginning of the work and its use.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from art_core.loop.metrics import Timer

T = TypeVar("T")

log = logging.getLogger("art_core.run")


class Pipeline(Generic[T]):
    """``async with Pipeline(make, steps, depth) as pipeline:`` and ``await pipeline.next()`` once per step, in order.

    ``make(step)`` is called once for each of ``steps``: with ``depth`` 0 in ``next`` itself, else in its own task, up to
    ``depth`` steps ahead and several at a time. Leaving the block cancels unfinished work.
    """

    def __init__(self, make: Callable[[int], Coroutine[Any, Any, T]], steps: range, depth: int) -> None:
        self._make, self._steps, self._depth = make, iter(steps), depth
        self._ahead: deque[asyncio.Task[T]] = deque()
        self._timer = Timer()

    async def next(self) -> T:
        """Return the next step's result, or raise its error; an error of later work waits for its step."""
        with self._timer.timed("waited"):
            if not self._depth:
                return await self._make(next(self._steps))
            while len(self._ahead) <= self._depth and (step := next(self._steps, None)) is not None:
                self._ahead.append(asyncio.create_task(self._make(step)))
            await asyncio.sleep(0)  # so that a cancellation is raised here, before the step begins
            result = await self._ahead[0]
            self._ahead.popleft()
            return result

    async def settled(self) -> None:
        """Wait until all work under way has ended; no more begins before ``next``, which raises its errors."""
        with self._timer.timed("waited"):
            if self._ahead:
                await asyncio.wait(self._ahead)

    def waited(self) -> float:
        """Return the seconds spent in ``next`` and ``settled`` since the last call."""
        return self._timer.taken().get("waited", 0.0)

    async def __aenter__(self) -> Pipeline[T]:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, _: object) -> None:
        for task in self._ahead:
            task.cancel()
        for outcome in await asyncio.gather(*self._ahead, return_exceptions=True):
            if isinstance(outcome, Exception) and outcome is not error:
                log.warning("the work for a later step failed too: %s: %s", type(outcome).__name__, outcome)
