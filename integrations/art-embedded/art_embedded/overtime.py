"""Interrupts third-party code that may never end, such as a chat template."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Overtime(Exception):
    """Work exceeded its time limit."""


def interrupted_after(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of ``work``; raise Overtime inside it if its Python code takes longer than ``seconds``.

    A call into C can't be interrupted, however long it takes.
    """
    ending, ended, sent, over = threading.Lock(), False, False, threading.Event()
    thread = ctypes.c_ulong(threading.get_ident())

    def send() -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(Overtime))

    def watch() -> None:
        nonlocal sent
        with ending:  # held until the work begins
            pause = seconds
        while not over.wait(pause):
            with ending:
                if ended:
                    return
                sent = True
                send()
            pause = 1.0  # repeat, because an exception raised in a destructor is lost

    ending.acquire()
    threading.Thread(target=watch, name="art-overtime", daemon=True).start()
    try:
        try:
            # Not earlier: an interrupt while a thread starts can leave its locks held forever.
            ending.release()
            return work()
        finally:
            with ending:
                ended = True
    finally:
        if sent:  # one may still be pending, and must not be raised after this function
            _absorb(send)
        over.set()


def _absorb(send: Callable[[], None]) -> None:
    """Raise and drop the exception that is pending in this thread.

    Cancelling it with None leaves a flag in CPython 3.11 and 3.12 that nothing clears: every later call is slower, and under
    a tracer (a debugger, coverage) Python 3.11 hangs at the next one.
    """
    with suppress(Overtime):
        send()
        while True:
            pass
