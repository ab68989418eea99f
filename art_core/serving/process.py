"""The parent's end of the serving process: starts it, gives it orders over a pipe, and says so when it dies.

Knows nothing about what is served.
"""

from __future__ import annotations

import atexit
import concurrent.futures
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
from dataclasses import dataclass
from multiprocessing import Pipe as connection_pair
from multiprocessing import current_process
from multiprocessing.connection import Connection

from art_core.errors import CaptureError, ConfigError, ServingDied
from art_core.serving.child import COMMAND, Pipe, pickled
from art_core.serving.service import ServingPlan

STOP_SECONDS = 30.0
"""How long the serving process may take to stop before it is killed."""


@dataclass(frozen=True)
class _Waiting:
    """A process that waits for a plan."""

    process: subprocess.Popen[bytes]
    connection: Connection

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


_early: list[tuple[_Waiting, object]] = []
"""At most one, and what it was started in."""


def start_early(*modules: str) -> None:
    """Start the process of this one's next engine now, and import ``modules`` there, while others load the agent.

    It is used if the environment is the same when the engine starts. If no process can be started, that start says so.
    """
    if not _early:
        with contextlib.suppress(OSError):
            _early.append((_begin(*modules), _surroundings()))


def _surroundings() -> object:
    """Return what a process inherits and cannot be sent later."""
    return dict(os.environ), os.getcwd()


@atexit.register
def _kill_early() -> None:
    while _early:
        _early.pop()[0].kill()


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
    """Return the process that was started early, if it is as one that were started now; else a new one."""
    while _early:
        early, surroundings = _early.pop()
        if surroundings == _surroundings() and early.process.poll() is None:
            return early
        early.kill()
    return _begin()


class ServingProcess:
    """``Serving`` in a child process: the same orders, the same futures."""

    def __init__(self, plan: ServingPlan) -> None:
        self._plan = plan
        self._numbers = itertools.count()
        self._pending: dict[int, concurrent.futures.Future] = {}
        self._lock = threading.Lock()
        self._died: CaptureError | None = None
        """Why nothing can be asked any more."""
        self._pipe: Pipe | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = threading.Thread(target=self._read, name="art-door", daemon=True)

    def start(self) -> concurrent.futures.Future[str]:
        """Start the process; the future gives the address, or what kept it from starting.

        Raises CaptureError where the system gives no process.
        """
        try:
            begun = _begun()
        except OSError as error:
            self._died = _not_started(error)
            raise self._died from error
        self._process, self._pipe = begun.process, Pipe(begun.connection)
        self._reader.start()
        # A process that has ended already is told by the reader.
        with contextlib.suppress(OSError):
            begun.connection.send_bytes(bytes(current_process().authkey))
            begun.connection.send(sys.path)
        return self.ask("start", self._plan)

    def ask(self, order: str, *args: object) -> concurrent.futures.Future:
        """Send an order; the future gives its result. Raises CaptureError where the process has died."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        # Whoever asks may be cancelled before the reply comes; the future must still take it.
        future.set_running_or_notify_cancel()
        number = next(self._numbers)
        try:
            payload = pickled(args)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            # Which of the three depends on the object and on the version of Python.
            future.set_exception(_not_picklable(order, error))
            return future
        with self._lock:
            if self._died is not None:
                raise self._died
            self._pending[number] = future
        # Where the process has died, the reader tells everybody who waits.
        with contextlib.suppress(OSError):
            self._pipe.send_pickled(number, order, payload)
        return future

    def stop(self) -> concurrent.futures.Future[None]:
        """Stop the process, or kill it where it takes too long. The future gives what was raised while ending."""
        stopped: concurrent.futures.Future[None] = concurrent.futures.Future()
        threading.Thread(target=self._stop, args=(stopped,), name="art-door-stop", daemon=True).start()
        return stopped

    def _stop(self, stopped: concurrent.futures.Future[None]) -> None:
        error: BaseException | None = None
        try:
            error = self._end()
        except BaseException as failure:  # noqa: BLE001  the thread's boundary: whoever waits for it raises the error
            error = failure
        finally:
            if error is None:
                stopped.set_result(None)
            else:
                stopped.set_exception(error)

    def _end(self) -> BaseException | None:
        """Return what the serving process raised while ending."""
        error = None
        # One that has died before has told so to all who waited.
        with contextlib.suppress(CaptureError):
            reply = self.ask("stop")
            done, _ = concurrent.futures.wait([reply], STOP_SECONDS)
            error = reply.exception() if done else None
        if self._process is not None:
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._reader.join()
        if self._pipe is not None:
            self._pipe.connection.close()
        return error

    def _read(self) -> None:
        connection = self._pipe.connection
        with contextlib.suppress(EOFError, OSError):
            # Where something that the child started holds the pipe open, only its exit code tells that it has died.
            while connection.poll(1.0) or self._process.poll() is None:
                if connection.poll(0):
                    self._take(*connection.recv())
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        with self._lock:
            self._died = _died(code)
            pending, self._pending = self._pending, {}
        for future in pending.values():
            future.set_exception(self._died)

    def _take(self, number: int | None, well: bool, payload: bytes) -> None:
        try:
            content = pickle.loads(payload)
        except Exception as error:  # noqa: BLE001  what an engine raises may not be importable here
            well, content = False, (CaptureError(f"the serving process sent what cannot be read here: {error}"), "")
        if number is None:
            log = logging.getLogger(content.name)
            if log.isEnabledFor(content.levelno):
                # The boundary to handlers of others; without this thread nobody is answered any more.
                with contextlib.suppress(Exception, SystemExit):
                    log.handle(content)
            return
        future = self._pending.pop(number)
        if well:
            future.set_result(content)
        else:
            error, text = content
            if not isinstance(error, ConfigError):  # which says all that there is to do
                error.add_note(f"In the serving process:\n{text}")
            future.set_exception(error)


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
    hint = (
        "; running out of memory is the usual cause: serve a smaller model or run fewer rollouts at a time"
        if code == -signal.SIGKILL
        else ""
    )
    return ServingDied(
        f"the serving process died: it {how} (exit code {code}){hint}. What it wrote last is on stderr; the calls that it "
        "recorded are in the store, so start again with the same run folder to go on"
    )


def _not_picklable(order: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"what the serving process needs cannot be sent to it ({order}: {error}); give engines, recorders and dialects as "
        "functions of a module that can be imported (functools.partial adds arguments), not as closures or open objects"
    )
