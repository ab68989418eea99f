"""Which Ray a run uses: one that is there, or one of its own that nobody else reaches and that is gone afterwards."""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from process_marks import marked

from art_core.capture import is_loopback

ROOT = Path(__file__).parents[3]
ON_ITS_OWN = """
import os, threading
import ray
from art_ray.cluster import Cluster

assert not ray.is_initialized()
held = []
thread = threading.Thread(target=lambda: held.extend([Cluster(), Cluster()]))
thread.start(); thread.join()  # Ray outlives the thread that asked for it
print(held[0].here, ray.get(ray.remote(lambda: os.getpid()).remote()) != os.getpid(), os.environ["RAY_AUTH_MODE"])
held[0].leave(); held[0].leave()
print(ray.is_initialized())
held[1].leave()
print(ray.is_initialized())
"""


def test_loopback_is_known_however_it_is_written():
    assert all(map(is_loopback, ("127.0.0.1", "localhost", "::1", "127.1.2.3")))
    assert not any(map(is_loopback, ("10.0.0.1", "trainer.example", "::2")))


@pytest.mark.engines
def test_a_local_ray_stays_on_loopback_asks_for_a_token_and_ends_with_its_last_holder():
    mark = uuid.uuid4().hex
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "ART_TEST_MARK": mark, "RAY_ADDRESS": "local"}
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | own
    done = subprocess.run([sys.executable, "-c", ON_ITS_OWN], env=env, capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == ["127.0.0.1", "True", "token", "True", "False"], done.stderr[-3000:]
    until = time.monotonic() + 20
    while (left := marked(mark)) and time.monotonic() < until:
        time.sleep(0.5)
    assert not left
