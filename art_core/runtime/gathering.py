"""Running many awaitables at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from typing import TypeVar

T = TypeVar("T")


async def gather_limited(jobs: Iterable[Callable[[], Awaitable[T]]], gate: asyncio.Semaphore | None = None) -> list[T]:
    """Run the jobs, each when ``gate`` admits it. The first exception cancels the rest and is raised."""

    async def run(job: Callable[[], Awaitable[T]]) -> T:
        async with gate or nullcontext():
            return await job()

    tasks = [asyncio.ensure_future(run(job)) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            if not task.cancelling():  # a second time would end its cleanup
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
