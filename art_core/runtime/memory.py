"""How much memory the machine has, how much it swaps, and returning freed memory to it."""

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
CONTAINER_USE = Path("/sys/fs/cgroup/memory.stat")
"""What a container with control groups version 2 uses, by kind, in bytes."""
MEMINFO = Path("/proc/meminfo")
VMSTAT = Path("/proc/vmstat")
"""Counts the pages that the whole machine has swapped in and out."""


def machine_memory() -> int:
    """Return the bytes of the machine's memory, or the container's limit if that is smaller."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in CONTAINER_LIMITS:
        # "max" means unlimited; each version of control groups has one of the files, macOS has none.
        with suppress(OSError, ValueError):
            sizes.append(int(path.read_text()))
    return min(sizes)


def used_memory() -> int:
    """Return the bytes of ``machine_memory`` in use, without what the system can reclaim; 0 if the system doesn't tell."""
    try:
        sizes = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
        total, available = (1024 * int(sizes[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        if machine_memory() < total:  # the container's limit, and MEMINFO is the machine's
            return int(dict(line.split() for line in CONTAINER_USE.read_text().splitlines())["anon"])
        return total - available
    except (OSError, KeyError, ValueError):
        return 0


def return_freed_memory() -> None:
    """Return freed blocks to the system, those between used ones too. Does nothing without glibc.

    glibc keeps large freed blocks for reuse. Trees differ from step to step, and so do their blocks: freed ones leave holes that
    the next step's don't fit, and the process grows until the machine is out of memory. So a process that holds tensors calls
    this between steps. Within a step, reuse is needed: getting new pages for every block takes as long as the step itself.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


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
