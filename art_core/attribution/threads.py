"""Threads and thread pools work for the rollout that started them or gave them work. Knows nothing about processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from typing import Any

from art_core.attribution.live import carried, current_rollout, exempted, while_live


def _carrying_submit(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    @wraps(submit)
    def carrying(self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        address, is_exempt = current_rollout.get(), exempted.get()
        if address is None and not is_exempt:
            return submit(self, function, *args, **kwargs)

        @wraps(function, updated=())
        def work(*args: Any, **kwargs: Any) -> Any:
            with carried(address, is_exempt):
                return function(*args, **kwargs)

        # A worker that the pool starts now outlives this rollout, so it must not carry it for good.
        with carried(None, False):
            return submit(self, work, *args, **kwargs)

    return carrying


def _carrying_start(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @wraps(start)
    def carrying(self: threading.Thread) -> None:
        address, is_exempt = current_rollout.get(), exempted.get()
        if address is not None or is_exempt:
            run = self.run

            def work() -> None:
                with carried(address, is_exempt):
                    run()

            self.run = work
        start(self)

    return carrying


while_live(ThreadPoolExecutor, "submit", _carrying_submit)
while_live(threading.Thread, "start", _carrying_start)
