"""The rollout that code runs in, what of it travels to threads and processes, and where a model call goes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from art_core.attribution import wrapping
from art_core.attribution.names import agent_name, calling_agents, calling_thread, starter_agents, starter_thread
from art_core.errors import CaptureError
from art_core.types import RolloutAddress, within

T = TypeVar("T")
current_rollout: ContextVar[RolloutAddress | None] = ContextVar("art_current_rollout", default=None)
"""None outside rollouts."""
exempted: ContextVar[bool] = ContextVar("art_exempt", default=False)
"""Whether this context is inside ``exempt``."""


@dataclass
class LiveRollout:
    """A rollout with at least one open ``inside_rollout`` block."""

    address: RolloutAddress
    blocks: int = 0
    elsewhere: dict[str, Counter[str]] = field(default_factory=lambda: {"refused": Counter(), "passed": Counter()})
    """Model calls that did not go to the policy: how many, by destination."""


live: dict[str, LiveRollout] = {}
"""Base URL -> live rollout. Other threads change it: read it with ``get`` or copy it first."""
_loop_threads: Counter[int | None] = Counter()
"""Thread -> how many ``inside_rollout`` blocks its event loop has open."""


@contextmanager
def inside_rollout(address: RolloutAddress) -> Iterator[None]:
    """Attribute what this block does, and the threads, tasks and child processes that it starts, to a rollout."""
    loop_thread = _loop_thread()
    with wrapping.lock:
        rollout = live.setdefault(address.base_url, LiveRollout(address))
        rollout.blocks += 1
        _loop_threads[loop_thread] += 1
        if len(live) == rollout.blocks == 1:
            wrapping.wrap()
    try:
        with assigned(current_rollout, address):
            yield
    finally:
        with wrapping.lock:
            rollout.blocks -= 1
            _loop_threads[loop_thread] -= 1
            if not rollout.blocks:
                live.pop(address.base_url, None)
            if not live:
                wrapping.unwrap()


def _loop_thread() -> int | None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return None
    return threading.get_ident()


def _after_fork() -> None:
    """Only the forking thread exists in a fork, so the only rollout that can still run is the one that it runs in."""
    for thread in _loop_threads.keys() - {threading.get_ident()}:
        del _loop_threads[thread]
    if current_rollout.get() is None:
        live.clear()
        wrapping.unwrap()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def assigned(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable for this block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def exempt() -> AbstractContextManager[None]:
    """Leave the model calls of a ``with`` block alone, for example those of a judge or a tracker."""
    return assigned(exempted, True)


class Origin(NamedTuple):
    """What work takes along to another thread or process.

    Not the whole context, because that would change what other libraries see there.
    """

    rollout: RolloutAddress | None = None
    exempt: bool = False
    agents: Mapping[str, str] | None = None
    thread: str | None = None


def origin() -> Origin | None:
    """Return the origin of work that is started here; None outside rollouts and ``exempt``."""
    rollout, is_exempt = current_rollout.get(), exempted.get()
    return Origin(rollout, is_exempt, calling_agents(), calling_thread()) if rollout or is_exempt else None


@contextmanager
def carried(origin: Origin) -> Iterator[None]:
    """Run this block as work from ``origin``."""
    with (
        assigned(current_rollout, origin.rollout),
        assigned(exempted, origin.exempt),
        assigned(starter_agents, origin.agents),
        assigned(starter_thread, origin.thread),
    ):
        yield


def destination(model: str | None, base_url: str | None = None) -> RolloutAddress | None:
    """Return the address of the rollout that a call to ``model`` belongs to, or None if it goes where the caller sends it.

    None too in a live rollout, whose calls are only recorded on their way.
    ``base_url`` is where the caller would send the call: if it is the address of a live rollout, the call belongs to that
    one, else to the current one. None if there is no rollout, if the rollout passes ``model`` or the calling node through,
    and inside ``exempt()``. Raises CaptureError if the call may belong to any rollout, because its thread carries none while
    some are live (the main thread and those that run an event loop with rollouts may call), and if a call that passes through
    has the rollout's own address.
    """
    if exempted.get():
        return None
    addressed = live.get(base_url.rstrip("/")) if base_url else None
    address = addressed.address if addressed else current_rollout.get()
    if address is None:
        return _check_thread_is_known(model)
    if address.live:
        return None
    if not _passes(model, address) and (not address.nodes or within(agent_name(), address.nodes)):
        return address
    if addressed:
        raise CaptureError(
            f"a call to {model!r} passes through, but its client has only the rollout's address, which a child process may "
            "have read from OPENAI_BASE_URL. Pass that client the base_url of its own provider"
        )
    return None


def _passes(model: str | None, address: RolloutAddress) -> bool:
    # Frameworks put the provider's name before the model's, clients don't. A plugin's set may contain more than it lists.
    listed = {name.rpartition("/")[2]: name for name in address.passthrough}
    return listed.get((model or "").rpartition("/")[2], model) in address.passthrough


def _check_thread_is_known(model: str | None) -> None:
    thread = threading.current_thread()
    if live and thread is not threading.main_thread() and _loop_threads[thread.ident] <= 0:
        raise CaptureError(
            f"a call to {model!r} on thread {thread.name!r} cannot be attributed to a rollout: {len(live)} are running, and "
            "this thread was started before them or by code that drops the context. Pass the client the rollout's own address "
            "(base_url=address.base_url in agent(task, address)), name the model in passthrough= if the call isn't "
            "meant for the policy, or start the thread inside the agent's run"
        )
