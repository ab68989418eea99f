"""Do something to a module when it is imported, so that nothing is imported only to be wrapped. Knows nothing about clients."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


def when_imported(module: str, action: Action) -> None:
    """Call ``action`` with ``module`` once: now if it has been imported, else right after its import.

    For plugins, from ``redirect_clients``. Whoever imports the module gets it with the action done; what ``action`` raises is
    raised there.
    """
    _actions.setdefault(module, []).append(action)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if module in sys.modules:
        importlib.import_module(module)  # waits for an import that is under way in another thread
        _act(module)


_actions: dict[str, list[Action]] = {}
"""By module, what is still to be done."""


def _act(name: str) -> None:
    for action in _actions.pop(name, []):
        action(sys.modules[name])


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _actions:
            return None
        others = (it for it in sys.meta_path if it is not self)
        spec = next((it for finder in others if (it := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Acting(spec.loader)
        return spec


class _Acting(Loader):
    """Loads like ``loader``, and acts then."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Before the module's own code: it may read its files through its loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _act(module.__name__)


_finder = _Finder()
