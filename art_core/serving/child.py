"""The serving process: runs commands that come over a pipe, and ends when its parent does.

Started by ``process.py`` with the command line below, never by multiprocessing, which would run the user's script
again. A message is (number, command, pickled (args, kwargs)); a reply is (number, success, pickled result or error). A
log record is a reply without a number.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import logging
import logging.handlers
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from multiprocessing import current_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from art_core.errors import ArtError, CaptureError, ConfigError
from art_core.runtime.stacks import stacks
from art_core.serving.service import ServingThread

COMMAND = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)  # shows where this is, and must not end it
# All processes of a terminal or a service get these; this one ends with its parent.
for stop in (signal.SIGINT, signal.SIGTERM):
    signal.signal(stop, signal.SIG_IGN)
sys.path[:] = sys.argv[2].split(chr(0x1f))
import art_core.serving.child as _child
_child.serve(int(sys.argv[1]), sys.argv[3:])
"""
END_SECONDS = 15.0
"""How long a process whose parent has died may take to end by itself."""


class Pipe:
    """A connection that several threads may send on. Both ends use it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, number: int | None, head: str | bool, payload: bytes) -> None:
        """Send one message. Raises OSError if the other end is gone."""
        with self._lock:
            self.connection.send((number, head, payload))

    def put_nowait(self, record: logging.LogRecord) -> None:
        """Send a log record; logging's QueueHandler calls this."""
        self.send(None, True, pickled(record))


def pickled(content: object) -> bytes:
    """Return ``content`` pickled; shared-memory tensors travel as handles, by what torch registers when it is
    imported."""
    buffer = io.BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(content)
    return buffer.getvalue()


def serve(fd: int, modules: Sequence[str] = ()) -> None:
    """Serve on the inherited end of the pipe; ``modules`` are imported while no plan has come. Does not return."""
    gc.disable()  # until the engine has started: loading makes a million objects and hardly any garbage
    os.set_inheritable(fd, False)
    pipe = Pipe(Connection(fd))
    logs = logging.getLogger("art_core")
    logs.setLevel(logging.INFO)
    logs.propagate = False
    logs.addHandler(logging.handlers.QueueHandler(pipe))
    with contextlib.suppress(EOFError, OSError):  # the parent has died: nobody is left to be notified
        # The key under which torch passes on the file descriptors of shared memory.
        current_process().authkey = pipe.connection.recv_bytes()
        for module in modules:
            with contextlib.suppress(Exception):  # the engine's start raises it
                importlib.import_module(module)
        sys.path[:] = pipe.connection.recv()
        _Commands(pipe).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of an engine must not keep a process alive that nobody can reach any more.
    os._exit(0)


class _Commands:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._server: ServingThread | None = None

    def run(self) -> None:
        """Run commands until ``stop`` comes or the parent dies, then stop the server."""
        stop, parent = None, os.getppid()
        try:
            while stop is None and self._has_message(parent):
                number, command, payload = self._pipe.connection.recv()
                if command == "stop":
                    stop = number
                else:
                    self._run(number, command, payload)
        finally:
            if stop is None:
                timer = threading.Timer(END_SECONDS, os._exit, (1,))
                timer.daemon = True
                timer.start()
            stopped = self._server.stop() if self._server else _resolved(None)
            wait([stopped])
            if stop is not None:
                self._reply(stop, stopped)

    def _has_message(self, parent: int) -> bool:
        # If a fork of the parent still holds its end of the pipe, only the parent's id shows that it has died.
        while not self._pipe.connection.poll(1.0):
            if os.getppid() != parent:
                return False
        return True

    def _run(self, number: int, command: str, payload: bytes) -> None:
        try:
            self._begin(command, payload).add_done_callback(partial(self._reply, number))
        except ArtError as error:
            self._send(number, False, _portable(error))

    def _begin(self, command: str, payload: bytes) -> Future[Any]:
        try:
            args, kwargs = pickle.loads(payload)
        except Exception as error:  # the boundary of the user's own modules
            raise ConfigError(
                f"the serving process cannot rebuild what it was sent ({command}: {type(error).__name__}: {error}); "
                "engines, recorders and dialects are named by module, so define them in a module that can be imported, "
                "not in the script that is run (__main__) and not inside a function"
            ) from error
        if command == "stacks":  # by this thread: that of the calls may be what hangs
            return _resolved(stacks(self._server and self._server.loop))
        if command != "start":
            return self._server.request(command, *args, **kwargs)
        self._server = ServingThread(*args)
        started = self._server.start()
        started.add_done_callback(_collect_garbage)
        return started

    def _reply(self, number: int, future: Future[Any]) -> None:
        error = CaptureError("the serving process is stopping") if future.cancelled() else future.exception()
        with contextlib.suppress(OSError):  # the parent may have died meanwhile
            self._send(number, error is None, _portable(error) if error else future.result())

    def _send(self, number: int, success: bool, content: object) -> None:
        self._pipe.send(number, success, pickled(content))


def _resolved(result: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _collect_garbage(_: object) -> None:
    """From now on, and not among the objects that exist already."""
    gc.freeze()
    gc.enable()


def _portable(error: BaseException) -> tuple[BaseException, str]:
    """Return the error and its traceback as text; a CaptureError in its place if it doesn't survive pickling."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickled(error))
    except Exception:  # noqa: BLE001  an exception class may do anything when it is rebuilt
        error = CaptureError(f"{type(error).__name__}: {error}")
    return error, text
