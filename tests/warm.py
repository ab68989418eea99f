"""Processes forked from one that has loaded torch and transformers: a start takes 0.3 s of CPU instead of 4.

``conftest.py`` has every test start its serving processes this way, unless it asks for ``cold_starts``.
"""

import atexit
import math
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe as connection_pair
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd

from art_core.serving import process

PRELOADED = ["art_embedded.engine", "art_core.learner.torch_learner", "art_cli.main"]
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}

cold_begin = process._begin
"""As it is outside the tests."""

FORKS = sys.platform == "linux" and not os.path.exists("/dev/nvidiactl")
"""Elsewhere every process is started cold: the system libraries of macOS do not survive a fork, nor does CUDA."""

_forks = multiprocessing.get_context("forkserver" if FORKS else "spawn")
_forks.set_forkserver_preload(PRELOADED)


class Forked:
    """A forked process with the interface of ``subprocess.Popen``."""

    def __init__(self, started: multiprocessing.Process) -> None:
        self._process = started
        self._asking = threading.Lock()
        self.pid = started.pid
        self.kill = started.kill

    def poll(self) -> int | None:
        with self._asking:  # multiprocessing loses the status if two threads ask for it at once
            return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class File:
    """An open file to pass on to a process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self):
        return _opened, (DupFd(self.number),)


def _opened(file) -> File:
    return File(file.detach())


def begin(*modules: str) -> tuple[Forked, Connection]:
    """Stand in for the function of this name in ``art_core.serving.process``."""
    ours, theirs = connection_pair()
    with theirs:
        started = _fork(_serve, (theirs, list(sys.path), modules), os.getcwd(), 2, 2)
    return started, ours


def program(code: str, arguments, *, cwd, stdout: int, stderr: int) -> Forked:
    """Run code as ``python -c`` does, in a session of its own. Its serving process is forked from it."""
    return _fork(_run, (code, arguments), cwd, stdout, stderr)


def _fork(target, arguments, cwd, stdout, stderr) -> Forked:
    surroundings = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}, str(cwd), File(stdout), File(stderr)
    _start_forkserver()
    started = _forks.Process(target=_within, args=(surroundings, target, arguments))
    started.start()
    # Before multiprocessing waits for it at the end of this process.
    atexit.register(started.kill)
    return Forked(started)


def _start_forkserver() -> None:
    """Start it with the environment that was there before any test, once."""
    if _forks.get_start_method() != "forkserver":
        return
    now = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(ENVIRONMENT)
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(now)


def _within(surroundings, target, arguments) -> None:
    environment, folder, stdout, stderr = surroundings
    for number, file in ((1, stdout), (2, stderr)):
        os.dup2(file.number, number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    target(*arguments)


def _serve(commands, path, modules) -> None:
    sys.argv[:] = ["-c", str(commands.fileno()), chr(0x1F).join(path), *modules]
    exec(process.PROGRAM, {"__name__": "__main__"})


def _run(code, arguments) -> None:
    global _forks
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if FORKS:
        _forks, process._begin = multiprocessing.get_context("fork"), begin
    sys.argv[:] = ["-c", *map(str, arguments)]
    exec(code, {"__name__": "__main__"})
