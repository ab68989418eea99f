"""What later steps need is begun while this one goes on. Knows nothing about what it is.

The bound: what step s needs is begun after step s - depth has been asked for, which its taker does when all steps before
that one are done. So at most ``depth`` steps are done between the beginning of the work and its use.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger("art_core.run")


class Pipeline(Generic[T]):
    """``async with Pipeline(make, steps, depth) as pipeline:`` and ``await pipeline.next()`` once per step, in order.

    ``make(step)`` is run once for each of ``steps``: with ``depth`` 0 when it is asked for, in the task of who asks; else
    in a task of its own, up to ``depth`` steps ahead, several at the same time. Leaving the block cancels what is not done.
    """

    def __init__(self, make: Callable[[int], Coroutine[Any, Any, T]], steps: range, depth: int) -> None:
        self._make, self._steps, self._depth = make, iter(steps), depth
        self._ahead: deque[asyncio.Task[T]] = deque()
        self._waited = 0.0

    async def next(self) -> T:
        """Return what the next step needs, or raise what making it raised. What failed ahead is raised when its turn comes."""
        with self._waiting():
            if not self._depth:
                return await self._make(next(self._steps))
            while len(self._ahead) <= self._depth and (step := next(self._steps, None)) is not None:
                self._ahead.append(asyncio.create_task(self._make(step)))
            await asyncio.sleep(0)  # a cancellation is met here, not in the step that would be begun
            result = await self._ahead[0]
            self._ahead.popleft()
            return result

    async def settled(self) -> None:
        """Return when nothing is under way; nothing new is begun before ``next``. What failed is raised there."""
        with self._waiting():
            if self._ahead:
                await asyncio.wait(self._ahead)

    def waited(self) -> float:
        """Return the seconds that ``next`` and ``settled`` took since this was last called."""
        seconds, self._waited = self._waited, 0.0
        return seconds

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - started

    async def __aenter__(self) -> Pipeline[T]:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        for task in self._ahead:
            task.cancel()
        for outcome in await asyncio.gather(*self._ahead, return_exceptions=True):
            if isinstance(outcome, Exception) and outcome is not error:
                log.warning("work for a later step failed too: %s: %s", type(outcome).__name__, outcome)
