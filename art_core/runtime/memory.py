"""How much memory the machine has, how much it swaps, and when memory is freed."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The container's limit in bytes: control groups version 2 and version 1."""
VMSTAT = Path("/proc/vmstat")
"""Counts the pages that the whole machine has swapped in and out."""

MMAP_THRESHOLD, TRIM_THRESHOLD = 2**20, 2**27
"""Bytes: blocks from the first on get a mapping of their own; the heap keeps at most the second free at its end."""
HEAP_SETTINGS = ("mmap_threshold", "trim_threshold", "mmap_max", "top_pad")
"""glibc's settings that turn its moving thresholds off."""


def machine_memory() -> int:
    """Return the bytes of the machine's memory, or the container's limit if that is smaller."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CONTAINER_LIMITS:
        # "max" means unlimited; each version of control groups has one of the files, macOS has none.
        with suppress(OSError, ValueError):
            sizes.append(int(path.read_text()))
    return min(sizes)


def bound_heap() -> None:
    """Make glibc return large freed blocks to the system; call it in every process that holds tensors, before it has many.

    By default, glibc raises the size from which a block gets its own mapping to that of the largest block freed so far, up
    to 32 MiB. Activations then lie in the heap. Trees differ from step to step, and so do their blocks: freed ones leave
    holes that the next step's don't fit, and the process grows until the machine is out of memory. Setting either threshold
    fixes both.

    Does nothing if the environment sets the heap (``MALLOC_MMAP_THRESHOLD_`` and its kin, or ``GLIBC_TUNABLES``), or if the
    C library has no such thresholds (macOS, musl).
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    chosen = any(
        f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}=" in tunables for name in HEAP_SETTINGS
    )
    mallopt = None if chosen or sys.platform != "linux" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, MMAP_THRESHOLD)  # M_MMAP_THRESHOLD of malloc.h
        mallopt(-1, TRIM_THRESHOLD)  # M_TRIM_THRESHOLD


def swapped_bytes() -> int:
    """Return how much the machine has swapped in and out since it started; 0 if the system doesn't count it."""
    try:
        counts = dict(line.split() for line in VMSTAT.read_text().splitlines())
        return os.sysconf("SC_PAGE_SIZE") * (int(counts["pswpin"]) + int(counts["pswpout"]))
    except (OSError, KeyError, ValueError):
        return 0


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Import large libraries inside: they create a million objects and hardly any garbage, and collecting would take as
    long as importing."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()  # together they make all objects old without visiting each
        gc.enable()
