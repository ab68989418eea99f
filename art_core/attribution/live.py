"""The rollout that code runs in, and the functions that are wrapped as long as any rollout is live.

Knows nothing about what the wrappers do: the files beside it name them with ``while_live``.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

from art_core.attribution.names import NOBODY, Caller, caller, starter
from art_core.types import RolloutAddress

current_rollout: ContextVar[RolloutAddress | None] = ContextVar("art_current_rollout", default=None)
"""None outside every rollout."""
exempted: ContextVar[bool] = ContextVar("art_exempt", default=False)
"""Whether the calls of this context are nobody's business: see ``exempt``."""

Function = Callable[..., Any]
Owner = type | ModuleType


@contextmanager
def running(address: RolloutAddress) -> Iterator[None]:
    """Attribute what this block does, and the threads, tasks and child processes that it starts, to a rollout."""
    loop_thread = _running_loop_thread()
    live.enter(address, loop_thread)
    token = current_rollout.set(address)
    try:
        yield
    finally:
        live.leave(address, loop_thread)
        current_rollout.reset(token)


def _running_loop_thread() -> int | None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return None
    return threading.get_ident()


class Origin(NamedTuple):
    """What travels with work to other threads and processes.

    Only what is ours: a whole context would change what other libraries see there.
    """

    rollout: RolloutAddress | None = None
    exempt: bool = False
    caller: Caller = NOBODY


def origin() -> Origin | None:
    """Return where work that is started here comes from; None where that is nobody's business."""
    rollout, is_exempt = current_rollout.get(), exempted.get()
    return None if rollout is None and not is_exempt else Origin(rollout, is_exempt, caller())


@contextmanager
def carried(origin: Origin) -> Iterator[None]:
    """Let this block be work from ``origin``."""
    tokens = current_rollout.set(origin.rollout), exempted.set(origin.exempt), starter.set(origin.caller)
    try:
        yield
    finally:
        current_rollout.reset(tokens[0])
        exempted.reset(tokens[1])
        starter.reset(tokens[2])


def while_live(owner: Owner | str, name: str, around: Callable[[Function], Function]) -> None:
    """Replace ``owner.name`` by ``around(owner.name)`` as long as any rollout is live.

    An ``owner`` of the form ``"package.module:Class"`` is wrapped if that is imported, and as soon as it is.
    """
    live.wraps.append((owner, name, around))


class _Live:
    def __init__(self) -> None:
        self.count = 0
        """How often a rollout has been entered and not left."""
        self.addresses: dict[str, RolloutAddress] = {}
        """Base URL -> the live rollout whose it is."""
        self.loop_threads: Counter[int] = Counter()
        """Threads that run an event loop with live rollouts."""
        self.wraps: list[tuple[Owner | str, str, Callable[[Function], Function]]] = []
        self.elsewhere: dict[str, dict[bool, Counter[str]]] = {}
        """Live rollout -> its model calls that were refused (True) or let through, and how often, by where they were to go."""
        self._entered: Counter[str] = Counter()
        self._lock = threading.RLock()  # wrapping may import, and importing wraps
        self._wrapped: list[_Wrapped] = []

    def enter(self, address: RolloutAddress, loop_thread: int | None) -> None:
        with self._lock:
            self.count += 1
            self._entered[address.base_url] += 1
            self.addresses[address.base_url] = address
            self.elsewhere.setdefault(address.rollout_id, {True: Counter(), False: Counter()})
            if loop_thread is not None:
                self.loop_threads[loop_thread] += 1
            if self.count == 1:
                sys.meta_path.insert(0, _imports)
                self.wrap()

    def leave(self, address: RolloutAddress, loop_thread: int | None) -> None:
        with self._lock:
            self.count -= 1
            self._entered[address.base_url] -= 1
            if not self._entered[address.base_url]:
                del self._entered[address.base_url], self.addresses[address.base_url]
                self.elsewhere.pop(address.rollout_id, None)
            if loop_thread is not None:
                self.loop_threads[loop_thread] -= 1
                self.loop_threads += Counter()  # Drops those that reached zero.
            if self.count == 0:
                self._unwrap()

    def start_over(self) -> None:
        """In a fork: no other thread is left, and of the rollouts only the one that this thread runs in."""
        self._lock = threading.RLock()
        self.loop_threads.clear()
        if current_rollout.get() is None:
            self.count = 0
            self.addresses.clear()
            self.elsewhere.clear()
            self._entered.clear()
            self._unwrap()

    def went_elsewhere(self, address: RolloutAddress, where: str, *, refused: bool) -> None:
        """Count a model call that the policy does not answer."""
        with self._lock:
            if address.rollout_id in self.elsewhere:
                self.elsewhere[address.rollout_id][refused][where] += 1

    def wrap(self) -> None:
        """Wrap what is imported and not wrapped yet, if a rollout is live."""
        with self._lock:
            for owner, name, around in self.wraps if self.count else ():
                found = _imported(owner) if isinstance(owner, str) else owner
                if found is not None and name in vars(found):
                    self._wrap(found, name, around)

    def _wrap(self, owner: Owner, name: str, around: Callable[[Function], Function]) -> None:
        in_place = vars(owner)[name]
        ours = [it.wrapper for it in self._wrapped]
        if any(layer is wrapper for layer in _layers(in_place) for wrapper in ours):
            return
        # Wrappers of other libraries are descriptors and work only if they are bound; put back is the descriptor itself.
        wrapper = around(getattr(owner, name))
        setattr(owner, name, wrapper)
        self._wrapped.append(_Wrapped(owner, name, in_place, wrapper))

    def _unwrap(self) -> None:
        """Restore what was wrapped. A wrapper of ours that another library has wrapped stays below theirs: outside a rollout it
        only passes calls on. It is kept in mind, because that library may put it back."""
        if _imports in sys.meta_path:
            sys.meta_path.remove(_imports)
        buried = []
        for it in self._wrapped:
            if vars(it.owner)[it.name] is it.wrapper:
                setattr(it.owner, it.name, it.original)
            else:
                buried.append(it)
        self._wrapped = buried


def _imported(owner: str) -> Owner | None:
    module, _, name = owner.partition(":")
    return getattr(sys.modules.get(module), name, None)


class _Imports(MetaPathFinder):
    """Finds nothing by itself, but wraps what is imported while a rollout is live."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in {owner.partition(":")[0] for owner, *_ in live.wraps if isinstance(owner, str)}:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((it for finder in others if (it := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_wrap(module: ModuleType) -> None:
                execute(module)
                live.wrap()

            spec.loader.exec_module = execute_and_wrap
        return spec


class _Wrapped(NamedTuple):
    owner: Owner
    name: str
    original: Any
    """As it stands in the owner's ``__dict__``."""
    wrapper: Function


def _layers(function: Any) -> Iterator[Any]:
    """Yield the function and what it says it wraps, the outermost first."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


_imports = _Imports()
live = _Live()
