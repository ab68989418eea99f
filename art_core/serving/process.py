"""The parent's end of the serving process: starts it, sends it commands over a pipe, and reports its death."""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from multiprocessing import Pipe as connection_pair
from multiprocessing import current_process
from multiprocessing.connection import Connection
from typing import Any

from art_core.errors import CaptureError, ConfigError, ServingDied
from art_core.serving.child import COMMAND, Pipe, pickled
from art_core.serving.service import ServingPlan

STOP_SECONDS = 30.0
"""How long the serving process may take to stop before it is killed."""


def _surroundings() -> object:
    """Return what a process inherits and cannot be sent later."""
    return dict(os.environ), os.getcwd()


@dataclass(frozen=True)
class _Waiting:
    """A process that waits for a plan."""

    process: subprocess.Popen[bytes]
    connection: Connection
    surroundings: object = field(default_factory=_surroundings)

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


_early: list[_Waiting] = []
"""At most one."""


def start_early(*modules: str) -> None:
    """Start the process of this one's next engine now, and import ``modules`` there, while others load the agent.

    It is used if the environment is the same when the engine starts. If no process can be started, that start says so.
    """
    if not _early:
        with contextlib.suppress(OSError):
            _early.append(_begin(*modules))


@atexit.register
def _kill_early() -> None:
    while _early:
        _early.pop().kill()


def _begin(*modules: str) -> _Waiting:
    ours, theirs = connection_pair()
    try:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, str(theirs.fileno()), chr(0x1F).join(sys.path), *modules],
                pass_fds=[theirs.fileno()],
                # Idle threads of torch that spin would take the cores from the agents.
                env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
                stdin=subprocess.DEVNULL,
                # The agents' process may print results that others read; an engine's chatter is not one.
                stdout=2,
            )
    except OSError:
        ours.close()
        raise
    return _Waiting(process, ours)


def _begun() -> _Waiting:
    """Return the process that was started early if a new one would be the same, else a new one."""
    while _early:
        early = _early.pop()
        if early.surroundings == _surroundings() and early.process.poll() is None:
            return early
        early.kill()
    return _begin()


class ServingProcess:
    """Runs a ``Serving`` in a child process: the same commands, the same futures as ``ServingThread``."""

    def __init__(self, plan: ServingPlan) -> None:
        self._plan = plan
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._died: CaptureError | None = None
        """Why no command can be sent any more."""
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = threading.Thread(target=self._read, name="art-serving", daemon=True)

    def start(self) -> Future[str]:
        """As ``ServingThread.start``. Raises CaptureError if no process can be started."""
        try:
            begun = _begun()
        except OSError as error:
            raise _not_started(error) from error
        self._process, self._pipe = begun.process, Pipe(begun.connection)
        self._reader.start()
        # The reader reports a process that has ended already.
        with contextlib.suppress(OSError):
            begun.connection.send_bytes(bytes(current_process().authkey))
            begun.connection.send(sys.path)
        return self.request("start", self._plan)

    def request(self, command: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Send a command, from any thread. Raises CaptureError if the process has died, ConfigError for what cannot be
        sent."""
        try:
            payload = pickled((args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            # Which of the three depends on the object and on the version of Python.
            raise ConfigError(
                f"what the serving process needs cannot be sent to it ({command}: {error}); pass engines, recorders "
                "and dialects as functions of a module that can be imported (functools.partial adds arguments), not as "
                "closures or open objects"
            ) from error
        number, future = next(self._numbers), Future[Any]()
        # Its waiter may be cancelled before the reply comes; the future is set all the same.
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._died is not None:
                raise self._died
            self._pending[number] = future
        # If the process has died, the reader tells everybody who waits.
        with contextlib.suppress(OSError):
            self._pipe.send(number, command, payload)
        return future

    def stop(self) -> Future[None]:
        """As ``ServingThread.stop``; kills a process that takes too long."""
        stopped: Future[None] = Future()

        def end() -> None:
            try:
                stopped.set_result(self._end())
            except BaseException as error:  # noqa: BLE001  the thread's boundary: whoever waits for it raises the error
                stopped.set_exception(error)

        threading.Thread(target=end, name="art-serving-stop", daemon=True).start()
        return stopped

    def _end(self) -> None:
        if self._process is None:
            return
        replied: set[Future[Any]] = set()
        # A process that died earlier has failed all that waited for it.
        with contextlib.suppress(CaptureError):
            replied, _ = wait([self.request("stop")], STOP_SECONDS)
        _ended(self._process, 1.0)
        self._reader.join()
        self._pipe.connection.close()
        for reply in replied:
            reply.result()

    def _read(self) -> None:
        connection = self._pipe.connection
        with contextlib.suppress(EOFError, OSError):
            # If something that the child started holds the pipe open, only its exit code shows that it has died.
            while connection.poll(1.0) or self._process.poll() is None:
                if connection.poll(0):
                    self._receive(*connection.recv())
        died = _died(_ended(self._process, 5.0))
        with self._lock:
            self._died, pending, self._pending = died, self._pending, {}
        for future in pending.values():
            future.set_exception(died)

    def _receive(self, number: int | None, success: bool, payload: bytes) -> None:
        try:
            content = pickle.loads(payload)
        except Exception as error:  # noqa: BLE001  what an engine raises may not be importable here
            success, content = False, (CaptureError(f"the serving process sent what cannot be read here: {error}"), "")
        if number is None:
            return _log(content) if success else None
        future = self._pending.pop(number)
        if success:
            return future.set_result(content)
        error, text = content
        if not isinstance(error, ConfigError):  # which says all that there is to do
            error.add_note(f"In the serving process:\n{text}")
        future.set_exception(error)


def _log(record: logging.LogRecord) -> None:
    log = logging.getLogger(record.name)
    if log.isEnabledFor(record.levelno):
        # The boundary to handlers of others: an error must not end the thread that receives replies.
        with contextlib.suppress(Exception, SystemExit):
            log.handle(record)


def _ended(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Return the exit code of a process, killed if it doesn't end by itself."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _not_started(error: OSError) -> CaptureError:
    hint = {
        errno.EMFILE: "; raise the limit of open files (ulimit -n)",
        errno.ENFILE: "; close what holds files open on this machine",
        errno.ENOMEM: "; free memory, or serve a smaller model",
        errno.EAGAIN: "; raise the limit of processes (ulimit -u)",
    }.get(error.errno, f"; is {sys.executable} a Python that can be run?")
    return CaptureError(f"the serving process cannot be started: {error}{hint}")


def _died(code: int) -> ServingDied:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else "ended"
    memory = "; running out of memory is the usual cause: serve a smaller model or run fewer rollouts at a time"
    return ServingDied(
        f"the serving process died: it {how} (exit code {code}){memory if code == -signal.SIGKILL else ''}. Its last "
        "output is on stderr; the recorded calls are in the store: train again with the same run_dir to resume"
    )
