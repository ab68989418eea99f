"""Runs a command, and ends it with all its child processes when the parent is gone.

    python guard.py COMMAND ...

Uses only the standard library and is run by its path, so any Python can run it. The parent holds the other end of standard
input. When that closes, because the parent has exited or was killed, or on SIGTERM or SIGINT, the command's process group
gets SIGTERM and, after a grace period, SIGKILL. The exit code is the command's; 128 + N if signal N ended it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE = 3.0
"""Seconds that the process group has to exit after a signal."""
PERIOD = 0.1
"""Seconds between checks of the command and the parent."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(command: list[str]) -> int:
    received: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: received.append(number))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getppid()
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_guard(os.getpid())
    )
    while child.poll() is None and not received and os.getppid() == parent and not closed(sys.stdin.fileno()):
        pass
    end_group(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def closed(fd: int) -> bool:
    """Wait up to ``PERIOD`` seconds; return whether the other end of the pipe ``fd`` was closed."""
    try:
        return bool(select.select([fd], [], [], PERIOD)[0]) and not os.read(fd, 1024)
    except InterruptedError:
        return False


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End the child's process group and reap the orphans that the guard has inherited."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        until = time.monotonic() + seconds
        while group_lives(child, number) and time.monotonic() < until:
            number = 0  # send the signal once, then only poll
            time.sleep(PERIOD / 4)
    child.wait()


def group_lives(child: subprocess.Popen[bytes], number: int) -> bool:
    """Send the group a signal (0: none); return whether it has live members."""
    if child.poll() is not None:
        reap()
    try:
        os.killpg(child.pid, number)
    except (ProcessLookupError, PermissionError):  # macOS raises PermissionError for a group of zombies
        return False
    return True


def reap() -> None:
    """Reap orphans that have exited: as the guard's children they count as group members until then."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def end_with_guard(guard: int):
    """Return a ``preexec_fn`` that ends the new process when the guard is killed (Linux only)."""

    def before_exec() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != guard:
            os._exit(1)

    return before_exec


def prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
