"""Confines a process with the kernel's means, through ctypes.

Linux only. Standard library only, and loaded without the package: the server of ``jail.py`` is a bare interpreter.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import struct

NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NET = (
    0x0002_0000, 0x0400_0000, 0x0800_0000, 0x1000_0000, 0x2000_0000, 0x4000_0000,
)  # fmt: skip
READ_ONLY, NO_SUID, NO_DEV, RECURSIVE, PRIVATE = 1, 2, 4, 16384, 1 << 18
DETACH = 2
SET_DEATH_SIGNAL, SET_NO_NEW_PRIVILEGES, SET_SECCOMP, FILTER = 1, 38, 22, 2
MACHINE = os.uname().machine
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}

CALLS = {
    # What a function needs to compute and to report its result. The rest fails with EPERM: nothing can be opened.
    # name: (x86_64, aarch64), None if there is no such call.
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233),
    "nanosleep": (35, 101), "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160), "gettimeofday": (96, 169),
    "getrusage": (98, 165), "times": (100, 153), "getuid": (102, 174), "getppid": (110, 173),
    "sigaltstack": (131, 132), "gettid": (186, 178), "time": (201, None), "futex": (202, 98),
    "restart_syscall": (219, 128), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "getrandom": (318, 278), "membarrier": (324, 283),
}  # fmt: skip


@functools.cache
def call_filter() -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]:
    """Return the filter program for the kernel, and the instructions that it points to."""
    column = list(AUDIT_ARCH).index(MACHINE)
    load, equal, ret = 0x20, 0x15, 0x06
    allow, refuse, kill = 0x7FFF_0000, 0x0005_0001, 0x8000_0000
    code = [(load, 0, 0, 4), (equal, 1, 0, AUDIT_ARCH[MACHINE]), (ret, 0, 0, kill), (load, 0, 0, 0)]
    for numbers in CALLS.values():
        if numbers[column] is not None:
            code += [(equal, 0, 1, numbers[column]), (ret, 0, 0, allow)]
    code.append((ret, 0, 0, refuse))
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in code))
    return ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(instructions))), instructions


def filter_calls() -> None:
    """Restrict this process to ``CALLS`` from now on. Raises OSError if the kernel can't."""
    program, _ = call_filter()
    _call("prctl", SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call("prctl", SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0)


def leave_the_machine() -> None:
    """Move this process into new namespaces: no network, and no files but one empty, read-only folder.

    Raises OSError if the system doesn't allow it.
    """
    user, group = os.getuid(), os.getgid()
    if MACHINE not in PIVOT_ROOT:
        raise OSError(f"namespaces: the number of pivot_root is not known on {MACHINE}")
    unshare(NEW_USER | NEW_MOUNTS | NEW_NET | NEW_IPC | NEW_UTS)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    # The new root may be mounted on any folder; pivot_root then stacks it over the old one, which is unmounted from below.
    _mount("tmpfs", "/proc", "tmpfs", READ_ONLY | NO_SUID | NO_DEV, "size=4k")
    os.chdir("/proc")
    _call("syscall", PIVOT_ROOT[MACHINE], b".", b".")
    _call("umount2", b".", DETACH)
    os.chdir("/")


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, for whatever reason."""
    _call("prctl", SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def unshare(flags: int) -> None:
    """Replace the namespaces of these kinds by new ones."""
    _call("unshare", flags)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _call("mount", *texts[:3], ctypes.c_ulong(flags), texts[3])


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _call(name: str, *arguments: object) -> None:
    if getattr(LIBC, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


LIBC = ctypes.CDLL(None, use_errno=True)
