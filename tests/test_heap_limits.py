"""Freed memory returns to the system after every step, in every process that holds tensors."""

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
    libc.free(pointer)  # those that stay keep the heap from shrinking
action()
print("kept", (resident() - before) // 2**20)
"""
NOTHING = "action = lambda: None"
FUNCTION = "from art_core.runtime.memory import return_freed_memory as action"
LEARNER = """
import pathlib, tempfile
from small_learner import make_learner, make_trees, save_model
learner = make_learner(save_model(pathlib.Path(tempfile.mkdtemp())))
trees = make_trees(learner)
learner.step(trees)
action = lambda: learner.step(trees)
"""
ENGINE = """
import asyncio
from art_core.config import TrainConfig
from art_core.types import Weights
from art_embedded import TINY
from art_embedded.engine import EmbeddedEngine
loop = asyncio.new_event_loop()
engine = EmbeddedEngine(str(TINY), TrainConfig())
loop.run_until_complete(engine.start())
load = lambda: loop.run_until_complete(engine.load(Weights(version=1, path=TINY)))
load()
action = load
"""

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        sys.platform != "linux" or "CS_GNU_LIBC_VERSION" not in os.confstr_names,
        reason="only glibc keeps freed memory",
    ),
]


def kept_after(code):
    """Return how many of 200 freed MiB a new process keeps after the ``action`` that ``code`` defines."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    environment = {**inherited, "PYTHONPATH": str(TESTS)}
    output = subprocess.check_output([sys.executable, "-c", code + FREED], env=environment, text=True)
    return int(output.split("kept ")[1].split()[0])


def test_by_default_a_process_keeps_freed_memory():
    assert kept_after(NOTHING) >= 150


@pytest.mark.parametrize("code", [FUNCTION, LEARNER, ENGINE], ids=["the function", "a learner", "the embedded engine"])
def test_freed_memory_returns_to_the_system(code):
    assert kept_after(code) <= 20
