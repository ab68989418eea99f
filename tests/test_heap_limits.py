"""Freed memory returns to the system in every process that holds tensors, unless the user configured the heap."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FREED = """
import ctypes, os
from pathlib import Path

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def block(size):
    pointer = libc.malloc(size)
    ctypes.memset(pointer, 1, size)
    return pointer

libc.free(block(30 * 2**20))  # from now on the heap takes blocks of up to this size
before = resident()
large, small = zip(*[(block(2 * 2**20), block(100_000)) for _ in range(100)])
for pointer in large:
    libc.free(pointer)
print("kept", (resident() - before) // 2**20)  # those that stay keep the heap from shrinking
"""
BOUND = "from art_core.runtime.memory import bound_heap; bound_heap()"
LEARNER = """
import pathlib, tempfile
from small_learner import make_learner, save_model
make_learner(save_model(pathlib.Path(tempfile.mkdtemp())))
"""
ENGINE = """
import asyncio
from art_core.config import TrainConfig
from art_embedded import TINY
from art_embedded.engine import EmbeddedEngine
engine = EmbeddedEngine(str(TINY), TrainConfig())
asyncio.run(engine.start())
"""

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        sys.platform != "linux" or "CS_GNU_LIBC_VERSION" not in os.confstr_names,
        reason="only glibc keeps freed memory",
    ),
]


def kept_after(code, **variables):
    """Return how many of 200 freed MiB a new process keeps after ``code``."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    environment = {**inherited, "PYTHONPATH": str(TESTS), **variables}
    output = subprocess.check_output([sys.executable, "-c", code + FREED], env=environment, text=True)
    return int(output.split("kept ")[1].split()[0])


def test_by_default_a_process_keeps_freed_memory():
    assert kept_after("") >= 150


@pytest.mark.parametrize("code", [BOUND, LEARNER, ENGINE], ids=["the function", "a learner", "the embedded engine"])
def test_freed_memory_returns_to_the_system(code):
    assert kept_after(code) <= 20


@pytest.mark.parametrize(
    "variables",
    [{"MALLOC_MMAP_THRESHOLD_": str(2**25)}, {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={2**25}"}],
    ids=["variable", "tunable"],
)
def test_the_users_own_heap_settings_take_precedence(variables):
    assert kept_after(BOUND, **variables) >= 150


def test_other_heap_settings_change_nothing():
    assert kept_after(BOUND, MALLOC_ARENA_MAX="2", GLIBC_TUNABLES="glibc.malloc.arena_max=2") <= 20
