"""Which code is the user's own: not Python's, an installed library's, art's or a plugin's."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sysconfig
from collections.abc import Iterable
from types import FrameType

from art_core.plugins import GROUP

_LIBRARY = re.compile(rf"<|{re.escape(sysconfig.get_path('stdlib'))}/|.*/(site|dist)-packages/")


def own_place(stack: Iterable[tuple[FrameType, int]]) -> str:
    """Return the innermost line of a stack (outermost call first) that is the user's own code; empty if none is."""
    for frame, line in reversed(list(stack)):
        file, package = frame.f_code.co_filename, frame.f_globals.get("__package__") or ""
        if is_own(file, package):
            return f"{file}:{line} in {frame.f_code.co_name}"
    return ""


def is_own(file: str, module: str) -> bool:
    """Whether code of this file and module is the user's own."""
    return not (_LIBRARY.match(file) or module.partition(".")[0] in _our_packages())


@functools.cache
def _our_packages() -> frozenset[str]:
    """Return the packages of art and its plugins. A prefix would not do: the user's own may begin with ``art_`` too."""
    plugins = importlib.metadata.entry_points(group=GROUP)
    return frozenset({"art_core", *(plugin.module.partition(".")[0] for plugin in plugins)})
