"""Which rollout is this code running in? Asked by client wrappers at every model call; knows nothing about clients.

The current rollout is a context variable. Tasks inherit it by themselves; while a rollout is live, executor submits and
thread starts carry it too. Nothing is touched while no rollout is live.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

from art_core.errors import CaptureError
from art_core.types import RolloutAddress, within

current_rollout: ContextVar[RolloutAddress | None] = ContextVar("art_current_rollout", default=None)
"""None outside every rollout."""
_exempt: ContextVar[bool] = ContextVar("art_exempt", default=False)


def destination(model: str | None) -> RolloutAddress | None:
    """Return where a call to ``model`` goes: the current rollout's address, or None for where the caller sends it.

    None where no rollout runs, where the rollout passes ``model`` or the calling node through, inside ``exempt()``, and on
    the main thread and the thread that runs the loop outside a rollout. Raises CaptureError on any other thread that
    carries no rollout while some are live: the call may belong to any of them.
    """
    if _exempt.get():
        return None
    address = current_rollout.get()
    if address is not None:
        elsewhere = model in address.passthrough or (address.nodes and not within(agent_name(), address.nodes))
        return None if elsewhere else address
    thread = threading.current_thread()
    if not _live.count or thread is threading.main_thread() or thread.ident in _live.loop_threads:
        return None
    raise CaptureError(
        f"a call to {model!r} on thread {thread.name!r} cannot be attributed to a rollout: {_live.count} are running, and "
        "this thread was started before them or by code that keeps no context. Give the client the rollout's own address "
        "(base_url=rollout.base_url), name the model in passthrough= if the policy is not meant, or start the thread inside "
        "the agent's run"
    )


@contextmanager
def exempt() -> Iterator[None]:
    """Leave the calls of this block alone, wherever they are made: a judge's or a tracker's, not the agent's."""
    token = _exempt.set(True)
    try:
        yield
    finally:
        _exempt.reset(token)


def name_agents(source: Callable[[], str | None]) -> None:
    """Ask ``source`` at every redirected call for the node or agent that is calling; it returns None where it knows none.

    For plugins of frameworks, from ``redirect_clients``. The same source again is not added.
    """
    if source not in _name_sources:
        _name_sources.append(source)


def agent_name() -> str | None:
    """Return the node or agent that is calling, from the first source that knows; for plugins that redirect calls."""
    return next((name for source in _name_sources if (name := source())), None)


_name_sources: list[Callable[[], str | None]] = []


@contextmanager
def running(address: RolloutAddress) -> Iterator[None]:
    """Attribute what this block does, and the threads and tasks that it starts, to a rollout."""
    loop_thread = _running_loop_thread()
    _live.enter(loop_thread)
    token = current_rollout.set(address)
    try:
        yield
    finally:
        _live.leave(loop_thread)
        current_rollout.reset(token)


def _running_loop_thread() -> int | None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return None
    return threading.get_ident()


class _Live:
    """How many rollouts are live, and the two functions that are wrapped as long as any is."""

    def __init__(self) -> None:
        self.count = 0
        self.loop_threads: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._wrapped: list[tuple[type, str, Callable[..., Any], Callable[..., Any]]] = []

    def enter(self, loop_thread: int | None) -> None:
        with self._lock:
            self.count += 1
            if loop_thread is not None:
                self.loop_threads[loop_thread] += 1
            if self.count == 1:
                self._wrap(ThreadPoolExecutor, "submit", _carrying_submit)
                self._wrap(threading.Thread, "start", _carrying_start)

    def leave(self, loop_thread: int | None) -> None:
        with self._lock:
            self.count -= 1
            if loop_thread is not None:
                self.loop_threads[loop_thread] -= 1
                self.loop_threads += Counter()  # Drops those that reached zero.
            if self.count == 0:
                for owner, name, original, wrapper in self._wrapped:
                    # Where somebody has wrapped ours meanwhile it stays below theirs; it carries nothing any more.
                    if owner.__dict__[name] is wrapper:
                        setattr(owner, name, original)
                self._wrapped.clear()

    def _wrap(self, owner: type, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = owner.__dict__[name]
        wrapper = around(original)
        setattr(owner, name, wrapper)
        self._wrapped.append((owner, name, original, wrapper))


_live = _Live()


@contextmanager
def _carried(address: RolloutAddress | None, exempted: bool) -> Iterator[None]:
    """Only what is ours travels: a whole context would change what other libraries see on their threads."""
    tokens = current_rollout.set(address), _exempt.set(exempted)
    try:
        yield
    finally:
        current_rollout.reset(tokens[0])
        _exempt.reset(tokens[1])


def _carrying_submit(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    @wraps(submit)
    def carrying(self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        address, exempted = current_rollout.get(), _exempt.get()
        if address is None and not exempted:
            return submit(self, function, *args, **kwargs)

        @wraps(function, updated=())
        def carried(*args: Any, **kwargs: Any) -> Any:
            with _carried(address, exempted):
                return function(*args, **kwargs)

        # A worker that the pool starts now outlives this rollout, so it must not carry it for good.
        with _carried(None, False):
            return submit(self, carried, *args, **kwargs)

    return carrying


def _carrying_start(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @wraps(start)
    def carrying(self: threading.Thread) -> None:
        address, exempted = current_rollout.get(), _exempt.get()
        if address is not None or exempted:
            run = self.run

            def carried() -> None:
                with _carried(address, exempted):
                    run()

            self.run = carried
        start(self)

    return carrying
