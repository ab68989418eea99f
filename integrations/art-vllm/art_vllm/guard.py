"""Runs a command and ends it, with all that it started, when whoever asked for it is gone. Knows nothing about vLLM.

    python guard.py COMMAND ...

Of the standard library alone and run by its path, so any Python runs it. The parent holds the other end of the standard
input: when that closes, because the parent has ended or was killed, or at SIGTERM or SIGINT, the command's process group
is asked to end (SIGTERM) and then made to (SIGKILL). The exit code is the command's; 128 + N where signal N ended it.
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
"""Seconds that the group has to end by itself."""
PERIOD = 0.1
"""Seconds between two looks at the command and the parent."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(command: list[str]) -> int:
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getppid()
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=end_with_the_guard(os.getpid())
    )
    while child.poll() is None and not asked and os.getppid() == parent and not closed(sys.stdin.fileno()):
        pass
    end_group(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def closed(fd: int) -> bool:
    """Wait a moment; say whether the other end of the pipe ``fd`` was closed."""
    try:
        return bool(select.select([fd], [], [], PERIOD)[0]) and not os.read(fd, 1024)
    except InterruptedError:
        return False


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End the child and all of its group, and what left the group but was inherited from it."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, GRACE)):
        until = time.monotonic() + seconds
        while group_lives(child, number) and time.monotonic() < until:
            number = 0  # the signal once, then only the question
            time.sleep(PERIOD / 4)
    child.wait()


def group_lives(child: subprocess.Popen[bytes], number: int) -> bool:
    """Send the group a signal, 0 for none, and say whether somebody is in it who has not ended."""
    if child.poll() is not None:
        reap()
    try:
        os.killpg(child.pid, number)
    except (ProcessLookupError, PermissionError):  # macOS says the latter of a group of the dead
        return False
    return True


def reap() -> None:
    """Take leave of the orphans that ended: where the guard inherits them they count as members until then."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def end_with_the_guard(guard: int):
    """Return what makes a new process end when the guard itself is killed, where the system (Linux) can do that."""

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
