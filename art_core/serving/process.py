"""Both ends of the serving process's pipe: ``ServingProcess`` sends commands, and ``serve`` runs them in the child.

The child runs ``PROGRAM``. It isn't started by multiprocessing, which would run the user's script again. A command is
(number, name, pickled (args, kwargs)), and its reply (number, success, pickled result or error). A log record travels
as a reply without a number.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import importlib
import itertools
import logging
import logging.handlers
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial
from multiprocessing import Pipe as connection_pair
from multiprocessing import current_process
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from art_core.errors import ArtError, CaptureError, ConfigError, ServingDied
from art_core.runtime.stacks import stacks
from art_core.runtime.threads import running_future, thread_future
from art_core.serving.service import ServingThread

PROGRAM = """
import faulthandler, signal, sys
faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)  # prints the stack, and must not end the process
# A terminal or a service signals all its processes; this one ends with its parent.
for stop in (signal.SIGINT, signal.SIGTERM):
    signal.signal(stop, signal.SIG_IGN)
sys.path[:] = sys.argv[2].split(chr(0x1f))
import art_core.serving.process as _process
_process.serve(int(sys.argv[1]), sys.argv[3:])
"""
STOP_SECONDS = 30.0
"""How long the child may take to stop before it is killed."""
ORPHAN_SECONDS = 15.0
"""How long a child whose parent has died may take to stop before it kills itself."""


class _Pipe:
    """One end of the pipe, on which several threads may send."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._lock = threading.Lock()

    def send(self, number: int | None, head: str | bool, payload: bytes) -> None:
        """Send one message. Raises OSError if the other end is closed."""
        with self._lock:
            self.connection.send((number, head, payload))

    def put_nowait(self, record: logging.LogRecord) -> None:
        """Send a log record; logging's QueueHandler calls this."""
        self.send(None, True, _pickled(record))


def _pickled(content: object) -> bytes:
    """Pickle ``content``. Tensors in shared memory travel as handles, if torch has been imported."""
    return bytes(ForkingPickler.dumps(content, pickle.HIGHEST_PROTOCOL))


# The parent's end


class ServingProcess:
    """Runs a ``Serving`` in a child process, with the methods of ``ServingThread``.

    The child starts at once, and imports ``modules`` while it waits for ``start``. Raises CaptureError if no process
    can be started.
    """

    def __init__(self, *modules: str) -> None:
        try:
            self._process, connection = _begin(*modules)
        except OSError as error:
            raise _not_started(error) from error
        self._pipe = _Pipe(connection)
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._died: CaptureError | None = None
        """Why no more commands can be sent."""

    def start(self, *args: Any, **kwargs: Any) -> Future[str]:
        """As ``ServingThread.start``. Raises ConfigError if an argument can't be pickled."""
        self._reader = thread_future("art-serving", self._read)
        with contextlib.suppress(OSError):  # the process has ended, which the reader reports
            self._pipe.connection.send_bytes(bytes(current_process().authkey))
            self._pipe.connection.send(sys.path)
        return self.request("start", *args, **kwargs)

    def request(self, command: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Send a command, from any thread. Raises CaptureError if the process has died, and ConfigError if an argument
        can't be pickled."""
        try:
            payload = _pickled((args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            # Which of the three depends on the object and on the version of Python.
            raise ConfigError(
                f"cannot send {command!r} to the serving process: {error}; pass engines, recorders and dialects as "
                "functions of a module that can be imported (functools.partial adds arguments), not as closures or "
                "open objects"
            ) from error
        number, future = next(self._numbers), running_future()
        with self._lock:
            if self._died is not None:
                raise self._died
            self._pending[number] = future
        with contextlib.suppress(OSError):  # the process has died, so the reader fails the future
            self._pipe.send(number, command, payload)
        return future

    def stop(self) -> Future[None]:
        """As ``ServingThread.stop``. Kills a process that takes too long."""
        return thread_future("art-serving-stop", self._end)

    def _end(self) -> None:
        replied: set[Future[Any]] = set()
        with contextlib.suppress(CaptureError):  # it died earlier, and the reader has failed what was pending
            replied, _ = wait([self.request("stop")], STOP_SECONDS)
        _exit_code(self._process, 1.0)
        self._reader.result()
        self._pipe.connection.close()
        for reply in replied:
            reply.result()

    def _read(self) -> None:
        connection = self._pipe.connection
        with contextlib.suppress(EOFError, OSError):
            # If a process that the child started holds the pipe open, only the exit code shows that the child has died.
            while connection.poll(1.0) or self._process.poll() is None:
                if connection.poll(0):
                    self._receive(*connection.recv())
        died = _died(_exit_code(self._process, 5.0))
        with self._lock:
            self._died, pending, self._pending = died, self._pending, {}
        for future in pending.values():
            future.set_exception(died)

    def _receive(self, number: int | None, success: bool, payload: bytes) -> None:
        try:
            content = pickle.loads(payload)
        except Exception as error:  # noqa: BLE001  an engine's exception may not be importable here
            success, content = False, (CaptureError(f"cannot read a reply of the serving process: {error}"), "")
        if number is None:
            return _log(content) if success else None
        future = self._pending.pop(number)
        if success:
            return future.set_result(content)
        error, text = content
        if not isinstance(error, ConfigError):  # whose message says all that there is to do
            error.add_note(f"In the serving process:\n{text}")
        future.set_exception(error)


_early: dict[object, ServingProcess] = {}
"""By what they have inherited; at most one."""


def start_early(*modules: str) -> None:
    """Start the process of the next engine now, and import ``modules`` there while this process loads the agent.

    It is only used if the environment is still the same when the engine starts. If no process can be started, the
    engine's start raises the error.
    """
    if not _early:
        with contextlib.suppress(CaptureError):
            _early[_inherited()] = ServingProcess(*modules)


def early_or_new() -> ServingProcess:
    """Return the process that was started early if a new one would be the same, else a new one."""
    early = _early.pop(_inherited(), None)
    _kill_early()
    return early if early and early._process.poll() is None else ServingProcess()


@atexit.register
def _kill_early() -> None:
    while _early:
        _, early = _early.popitem()
        early._pipe.connection.close()
        _exit_code(early._process, 0)


def _inherited() -> object:
    """Return what a process inherits and can't be sent later."""
    return frozenset(os.environ.items()), os.getcwd()


def _begin(*modules: str) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = connection_pair()
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno()), chr(0x1F).join(sys.path), *modules],
                pass_fds=[theirs.fileno()],
                # torch's idle threads would spin and take the cores from the agents.
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
                stdin=subprocess.DEVNULL,
                # stdout may carry this program's results, which an engine's prints must not mix with.
                stdout=2,
            )
    except OSError:
        ours.close()
        raise
    return process, ours


def _log(record: logging.LogRecord) -> None:
    log = logging.getLogger(record.name)
    if log.isEnabledFor(record.levelno):
        # A handler of somebody else's must not end the thread that receives replies.
        with contextlib.suppress(Exception, SystemExit):
            log.handle(record)


def _exit_code(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Return the exit code of a process, which is killed if it doesn't end in time."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _not_started(error: OSError) -> CaptureError:
    hint = {
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
        errno.ENFILE: "close programs that hold files open on this machine",
        errno.ENOMEM: "free memory, or serve a smaller model",
        errno.EAGAIN: "raise the limit of processes (ulimit -u)",
    }.get(error.errno, f"check that {sys.executable} is a Python that runs")
    return CaptureError(f"the serving process cannot be started: {error}; {hint}")


def _died(code: int) -> ServingDied:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "ended"
    memory = "; running out of memory is the usual cause: serve a smaller model or run fewer rollouts at a time"
    return ServingDied(
        f"the serving process died: it {how} (exit code {code}){memory if code == -signal.SIGKILL else ''}. Its last "
        "output is on stderr; the recorded calls are in the store: train again with the same run_dir to resume"
    )


# The child's end


def serve(fd: int, modules: Sequence[str]) -> None:
    """Serve on the pipe ``fd``, which this process inherited. Does not return."""
    gc.disable()  # until the engine has started: loading makes a million objects and hardly any garbage
    os.set_inheritable(fd, False)
    pipe = _Pipe(Connection(fd))
    logs = logging.getLogger("art_core")
    logs.setLevel(logging.INFO)
    logs.propagate = False
    logs.addHandler(logging.handlers.QueueHandler(pipe))
    with contextlib.suppress(EOFError, OSError):  # the parent has died
        # multiprocessing sends the file descriptors of shared memory only to processes with this key.
        current_process().authkey = pipe.connection.recv_bytes()
        for module in modules:
            with contextlib.suppress(Exception):  # the engine's start raises it
                importlib.import_module(module)
        sys.path[:] = pipe.connection.recv()
        _Commands(pipe).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine's threads must not keep a process alive that nobody can reach any more


class _Commands:
    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe
        self._server: ServingThread | None = None

    def run(self) -> None:
        """Run commands until ``stop`` comes or the parent dies, then stop the server."""
        parent, command = os.getppid(), None
        try:
            while command != "stop" and self._has_message(parent):
                number, command, payload = self._pipe.connection.recv()
                if command != "stop":
                    self._run(number, command, payload)
        finally:
            if command != "stop":
                timer = threading.Timer(ORPHAN_SECONDS, os._exit, (1,))
                timer.daemon = True
                timer.start()
            stopped = self._server.stop() if self._server else _resolved(None)
            wait([stopped])
            if command == "stop":
                self._reply(number, stopped)

    def _has_message(self, parent: int) -> bool:
        # If a fork of the parent still holds its end of the pipe, only the parent's id shows that it has died.
        while not self._pipe.connection.poll(1.0):
            if os.getppid() != parent:
                return False
        return True

    def _run(self, number: int, command: str, payload: bytes) -> None:
        try:
            future = self._begin(command, payload)
        except ArtError as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(partial(self._reply, number))

    def _begin(self, command: str, payload: bytes) -> Future[Any]:
        try:
            args, kwargs = pickle.loads(payload)
        except Exception as error:  # the boundary of the user's own modules
            raise ConfigError(
                f"the serving process cannot unpickle the arguments of {command!r} ({type(error).__name__}: {error}); "
                "engines, recorders and dialects are pickled by the name of their module, so define them in a module "
                "that can be imported, not in the script that is run (__main__) and not inside a function"
            ) from error
        if command == "stacks":  # in this thread, because the loop may be what hangs
            return _resolved(stacks(self._server and self._server.loop))
        if command != "start":
            return self._server.request(command, *args, **kwargs)
        self._server = ServingThread()
        started = self._server.start(*args, **kwargs)
        started.add_done_callback(_collect_garbage)
        return started

    def _reply(self, number: int, future: Future[Any]) -> None:
        error = CaptureError("the serving process is stopping") if future.cancelled() else future.exception()
        with contextlib.suppress(OSError):  # the parent may have died
            self._pipe.send(number, error is None, _pickled(_portable(error) if error else future.result()))


def _resolved(result: object) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def _collect_garbage(_: object) -> None:
    """Enable garbage collection, for objects that are made from now on."""
    gc.freeze()
    gc.enable()


def _portable(error: BaseException) -> tuple[BaseException, str]:
    """Return the error, or a CaptureError if it doesn't survive pickling, and its traceback as text."""
    text = "".join(traceback.format_exception(error))
    try:
        pickle.loads(_pickled(error))
    except Exception:  # noqa: BLE001  an exception class may do anything when it is rebuilt
        error = CaptureError(f"{type(error).__name__}: {error}")
    return error, text
