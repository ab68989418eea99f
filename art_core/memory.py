"""How much memory there is, as the machine and a container's limit say, and Python's garbage. Knows nothing about models."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux says how many bytes this container may use: control groups version 2 and version 1."""


def machine_memory() -> int:
    """Return the bytes of the machine's memory, or of a container's limit where that is smaller."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CONTAINER_LIMITS:
        # Each version of control groups has one of the files, macOS neither; "max" is no limit.
        with suppress(OSError):
            sizes += [int(text)] if (text := path.read_text().strip()).isdigit() else []
    return min(sizes)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Import large libraries inside: they make a million objects and hardly any garbage, and looking for it takes as long as
    importing them."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # both together make all of them old, without looking at each
        gc.enable()
