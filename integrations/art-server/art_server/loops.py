"""Event loops in separate threads."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger("art_server")


@contextmanager
def background_loop(name: str) -> Iterator[asyncio.AbstractEventLoop]:
    """Yield an event loop that runs in a separate thread; tasks that still run there at the end are cancelled."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=_run, args=(loop,), name=name, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(_cancel_others(), loop).add_done_callback(
            lambda _: loop.call_soon_threadsafe(loop.stop)
        )
        thread.join(5)  # an agent may block its loop; then the thread ends with the process
        if not thread.is_alive():
            loop.close()


async def in_loop(loop: asyncio.AbstractEventLoop | None, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` in ``loop`` (None: in the current loop). Cancelling this cancels ``work``."""
    if loop is None:
        return await asyncio.create_task(work)  # which an agent may cancel
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        try:
            return loop.run_forever()
        except SystemExit as error:  # from a task that nobody awaits; the other tasks continue
            log.warning(
                "a task in %s called exit(%s); only that task ends", threading.current_thread().name, error.code
            )


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.wait([asyncio.create_task(asyncio.sleep(0)), *others], timeout=2)
