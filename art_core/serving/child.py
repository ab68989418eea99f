"""The serving process: takes orders over a pipe from the process that runs the agents, and ends when that one does.

Started by ``process.py`` with the command line below, never by multiprocessing, which would run the user's script again.
A message is (number, order, pickled arguments); a reply is (number, it went well, pickled result or error); a log record
is a reply without a number.
"""

from __future__ import annotations

import concurrent.futures
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
from functools import partial
from multiprocessing import current_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

from art_core.errors import CaptureError, ConfigError
from art_core.runtime.stacks import stacks
from art_core.serving.service import Serving, ServingPlan

COMMAND = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)  # shows where this is, and must not end it
for stop in (signal.SIGINT, signal.SIGTERM):  # all processes of a terminal or a service get them; this one ends with its parent
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

    def send(self, number: int | None, order: str | bool, content: object) -> None:
        """Send one message. ``content`` is pickled with torch's reductions where torch is loaded."""
        self.send_pickled(number, order, pickled(content))

    def send_pickled(self, number: int | None, order: str | bool, payload: bytes) -> None:
        """Send one message whose content has been pickled. Raises OSError where the other end is gone."""
        with self._lock:
            self.connection.send((number, order, payload))

    def put_nowait(self, record: logging.LogRecord) -> None:
        """Send a log record; the interface that logging's QueueHandler asks of a queue."""
        self.send(None, True, record)


def pickled(content: object) -> bytes:
    """Return ``content`` pickled; shared-memory tensors travel as handles."""
    buffer = io.BytesIO()
    ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(content)
    return buffer.getvalue()


def serve(fd: int, modules: Sequence[str] = ()) -> None:
    """Run the serving process on the inherited end of the pipe; the ``modules`` are what it will need. Does not return."""
    gc.disable()  # until the engine has started: loading makes a million objects and hardly any garbage
    os.set_inheritable(fd, False)
    pipe = Pipe(Connection(fd))
    logs = logging.getLogger("art_core")
    logs.setLevel(logging.INFO)
    logs.propagate = False
    logs.addHandler(logging.handlers.QueueHandler(pipe))
    # Where the parent has died there is nobody left to tell.
    with contextlib.suppress(EOFError, OSError):
        # The key under which torch hands over the file descriptors of shared memory.
        current_process().authkey = pipe.connection.recv_bytes()
        for module in modules:
            with contextlib.suppress(Exception):  # the engine's start says it
                importlib.import_module(module)
        sys.path[:] = pipe.connection.recv()
        _Child(pipe).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of an engine must not keep a process alive that nobody can reach any more.
    os._exit(0)


class _Child:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._parent = os.getppid()
        self._serving: Serving | None = None

    def run(self) -> None:
        try:
            while self._waited_for_orders():
                number, order, payload = self._pipe.connection.recv()
                if order == "stop":
                    return self._stop(number)
                self._obey(number, order, payload)
        finally:
            self._end()

    def _stop(self, number: int) -> None:
        if self._serving is None:
            return self._pipe.send(number, True, None)
        stopped = self._serving.stop()
        concurrent.futures.wait([stopped])
        self._reply(number, stopped)

    def _waited_for_orders(self) -> bool:
        # Where a fork of the parent still holds its end of the pipe, only the parent's id tells that it has died.
        while not self._pipe.connection.poll(1.0):
            if os.getppid() != self._parent:
                return False
        return True

    def _obey(self, number: int, order: str, payload: bytes) -> None:
        try:
            args = pickle.loads(payload)
        except Exception as error:  # noqa: BLE001  the boundary of the user's own modules: the parent raises it
            return self._pipe.send(number, False, _portable(_not_importable(order, error)))
        if order == "stacks":  # by this thread: that of the calls may be what hangs
            return self._pipe.send(number, True, stacks(self._serving and self._serving.loop))
        try:
            future = self._start(*args) if order == "start" else self._serving.ask(order, *args)
        except CaptureError as error:
            return self._pipe.send(number, False, _portable(error))
        future.add_done_callback(partial(self._reply, number))

    def _start(self, plan: ServingPlan) -> concurrent.futures.Future[str]:
        self._serving = Serving(plan)
        started = self._serving.start()
        started.add_done_callback(_collect_garbage)
        return started

    def _reply(self, number: int, future: concurrent.futures.Future) -> None:
        error = CaptureError("the serving process is stopping") if future.cancelled() else future.exception()
        # The parent may have died meanwhile.
        with contextlib.suppress(OSError):
            self._pipe.send(number, error is None, future.result() if error is None else _portable(error))

    def _end(self) -> None:
        timer = threading.Timer(END_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()
        if self._serving is not None:
            concurrent.futures.wait([self._serving.stop()])


def _collect_garbage(_: object) -> None:
    """From now on, and not among what is there already."""
    gc.freeze()
    gc.enable()


def _not_importable(order: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"the serving process cannot rebuild what it was sent ({order}: {type(error).__name__}: {error}); engines, recorders "
        "and dialects are named by module, so define them in a module that can be imported, not in the script that is run "
        "(__main__) and not inside a function"
    )


def _portable(error: BaseException) -> tuple[BaseException, str]:
    """Return the error with its traceback as text, as itself where it survives pickling, else as a CaptureError."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickled(error))
    except Exception:  # noqa: BLE001  an exception class may do anything when it is rebuilt
        error = CaptureError(f"{type(error).__name__}: {error}")
    return error, text
