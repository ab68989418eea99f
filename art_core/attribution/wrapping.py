"""Act on a module when it is imported, and wrap functions for as long as any rollout is live.

Nothing is imported only to be wrapped. Other libraries may wrap the same functions before, during and after.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]
Function = Callable[..., Any]
Wrap = Callable[[Function], Function]

lock = threading.RLock()
"""Held while functions are wrapped and rollouts begin and end. Reentrant, because wrapping may import and importing wraps."""
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

_actions: dict[str, list[Action]] = {}
"""Module -> what waits for its import."""
_targets: dict[str, Wrap] = {}
_wrapped: list[tuple[Any, str, Any, Function]] = []
"""Owner and name of a wrapped function, what the owner's ``__dict__`` held, and our wrapper."""
_live = False


def when_imported(module: str, action: Action) -> None:
    """Call ``action`` with ``module`` once: now if it is imported, else right after its import.

    For plugins, from ``redirect_clients``. The import returns once ``action`` has run, and raises what it raises.
    """
    _actions.setdefault(module, []).append(action)
    _watch_imports()
    if module in sys.modules:
        importlib.import_module(module)  # waits for another thread that is importing it
        _act(module)


def wrap_while_live(wrap_function: Wrap, *targets: str) -> None:
    """Replace functions by ``wrap_function(function)`` while any rollout is live, once their modules are imported.

    ``targets`` look like ``"os:system"`` and ``"http.client:HTTPConnection.request"``.
    """
    _targets.update(dict.fromkeys(targets, wrap_function))


def wrap() -> None:
    """Wrap what is imported and not wrapped yet, and until ``unwrap`` what will be imported."""
    global _live
    with lock:
        _live = True
        _watch_imports()
        for target, wrap_function in _targets.items():
            module, _, path = target.partition(":")
            *classes, name = path.split(".")
            owner: Any = sys.modules.get(module)
            for name_of_class in classes:
                owner = getattr(owner, name_of_class, None)
            original = getattr(owner, "__dict__", {}).get(name)
            if original is None or _is_wrapped(original):
                continue
            # Other libraries' wrappers are descriptors that work only if they are bound; restored is the descriptor itself.
            wrapper = wrap_function(getattr(owner, name))
            setattr(owner, name, wrapper)
            _wrapped.append((owner, name, original, wrapper))


def _is_wrapped(function: Any) -> bool:
    """Whether a wrapper of ours is in place, on top or below those of other libraries."""
    while function is not None and all(function is not wrapper for *_, wrapper in _wrapped):
        function = getattr(function, "__wrapped__", None)
    return function is not None


def unwrap() -> None:
    """Restore what is wrapped, also below the wrappers of other libraries.

    Below one that can't be told what to call, ours stays and only passes calls on until that one is removed.
    """
    global _live
    with lock:
        _live = False
        _wrapped[:] = [place for place in _wrapped if not _restore(*place)]


def _restore(owner: Any, name: str, original: Any, wrapper: Function) -> bool:
    above, function = None, vars(owner)[name]
    while function is not None and function is not wrapper:
        above, function = function, getattr(function, "__wrapped__", None)
    if above is None:
        setattr(owner, name, original)
    elif function is wrapper and hasattr(type(above), "__wrapped__"):  # wrapt's, which calls what this is
        above.__wrapped__ = original
    else:
        return False
    return True


def _watch_imports() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _act(module: str) -> None:
    for action in _actions.pop(module, []):
        action(sys.modules[module])
    with lock:
        if _live:
            wrap()


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _actions and not any(target.startswith(f"{name}:") for target in _targets):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Acting(spec.loader)
        return spec


class _Acting(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Before the module's own code runs: it may read its files through its loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _act(module.__name__)


_finder = _Finder()
