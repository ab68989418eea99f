"""Threads and thread pools work for the rollout that started them or gave them work. Knows nothing about processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from typing import Any

from art_core.attribution.live import Origin, carried, origin, while_live


def _carrying_submit(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    @wraps(submit)
    def carrying(self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        here = origin()
        if here is None:
            return submit(self, function, *args, **kwargs)

        @wraps(function, updated=())
        def work(*args: Any, **kwargs: Any) -> Any:
            with carried(here):
                return function(*args, **kwargs)

        # A worker that the pool starts now outlives this rollout, so it must not carry it for good.
        with carried(Origin()):
            return submit(self, work, *args, **kwargs)

    return carrying


def _carrying_start(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @wraps(start)
    def carrying(self: threading.Thread) -> None:
        here = origin()
        if here is not None:
            run = self.run

            def work() -> None:
                with carried(here):
                    run()

            self.run = work
        start(self)

    return carrying


while_live(ThreadPoolExecutor, "submit", _carrying_submit)
while_live(threading.Thread, "start", _carrying_start)
