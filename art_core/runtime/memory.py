"""How much memory the machine has, whether it swaps, and when memory is freed."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Where Linux says how many bytes this container may use: control groups version 2 and version 1."""
VMSTAT = Path("/proc/vmstat")
"""Linux counts here, for the whole machine, the pages that were swapped in and out."""

MMAP_THRESHOLD, TRIM_THRESHOLD = 2**20, 2**27
"""Bytes: from which size on a block is a mapping of its own, and how much of the heap's free end is kept."""
HEAP_SETTINGS = ("mmap_threshold", "trim_threshold", "mmap_max", "top_pad")
"""Of glibc: each of them also turns its moving thresholds off."""


def machine_memory() -> int:
    """Return the bytes of the machine's memory, or of a container's limit where that is smaller."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CONTAINER_LIMITS:
        # Each version of control groups has one of the files, macOS neither; "max" is no limit.
        with suppress(OSError):
            sizes += [int(text)] if (text := path.read_text().strip()).isdigit() else []
    return min(sizes)


def bound_heap() -> None:
    """Make glibc return large freed blocks to the system; called in every process that holds tensors, before it has many.

    By default glibc raises the size from which a block is mapped by itself to that of the largest block freed so far, up to
    32 MiB. Activations then lie in the heap. Trees differ from step to step, so their blocks do too: freed ones leave holes
    that the next step's do not fit, and the process grows until the machine is out of memory. Setting either threshold keeps
    both where they are.

    Does nothing if the environment sets the heap (``MALLOC_MMAP_THRESHOLD_`` and its kin, or ``GLIBC_TUNABLES``), or if the
    C library has no such thresholds (macOS, musl).
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    chosen = any(
        f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}=" in tunables for name in HEAP_SETTINGS
    )
    if chosen or sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, MMAP_THRESHOLD)  # M_MMAP_THRESHOLD of malloc.h
        mallopt(-1, TRIM_THRESHOLD)  # M_TRIM_THRESHOLD


class Swapping:
    """How fast the machine swaps; 0 if the system does not say."""

    def __init__(self) -> None:
        self._before = _swapped_bytes(), time.monotonic()

    def rate(self) -> float:
        """Return the bytes per second that were swapped in and out since the last call."""
        (swapped, then), self._before = self._before, (_swapped_bytes(), time.monotonic())
        return (self._before[0] - swapped) / max(self._before[1] - then, 1e-3)


def _swapped_bytes() -> int:
    try:
        counts = dict(line.split() for line in VMSTAT.read_text().splitlines())
        return os.sysconf("SC_PAGE_SIZE") * (int(counts["pswpin"]) + int(counts["pswpout"]))
    except (OSError, KeyError, ValueError):
        return 0


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
