"""The example with a training server and its clients, as somebody would start it, one client killed meanwhile."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

EXAMPLE = Path(__file__).parent.parent / "examples" / "client_server"
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(script, *arguments, **options):
    command = [sys.executable, "-u", str(EXAMPLE / script), *map(str, arguments)]
    return subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


def test_every_episode_ends_once_though_a_client_is_killed():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    server = start("server.py", "--episodes", 10, "--lease", 3, "--port", port)
    clients = [start("client.py", f"client_{n}", f"ws://127.0.0.1:{port}") for n in range(2)]
    try:
        for line in clients[0].stdout:
            if line.startswith("connected"):
                break
        threading.Timer(0.5, clients[0].send_signal, [signal.SIGKILL]).start()
        said, _ = server.communicate(timeout=120)
        assert re.search(r"^10 episodes ended, 0 failed, mean reward \d\.\d+$", said, re.M), said
        assert clients[1].wait(30) == 0, clients[1].stdout.read()
    finally:
        for process in (server, *clients):
            process.kill()
            process.wait()
            process.stdout.close()
