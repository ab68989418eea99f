"""Interrupts code of others that may never end, such as a chat template."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Overtime(Exception):
    """Work took longer than it may."""


def interrupted_after(seconds: float, work: Callable[[], T]) -> T:
    """Return what ``work`` returns; Overtime is raised in the midst of it where its Python code takes longer.

    For code of others, which may never end. One call into C cannot be interrupted, however long it takes.
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
            pause = 1.0  # once more: what is raised in a destructor is lost

    ending.acquire()
    threading.Thread(target=watch, name="art-overtime", daemon=True).start()
    try:
        try:
            # Not earlier: what interrupts the start of a thread can leave its locks taken for ever.
            ending.release()
            return work()
        finally:
            with ending:
                ended = True
    finally:
        if sent:  # one may still be on its way, and must not be raised after this function
            _take(send)
        over.set()


def _take(send: Callable[[], None]) -> None:
    """Raise and drop what is on its way to this thread.

    Taking it back with None leaves a flag in CPython 3.11 and 3.12 that nothing clears: every later call is slower, and under
    a tracer (a debugger, coverage) Python 3.11 never gets past the next one.
    """
    with suppress(Overtime):
        send()
        while True:
            pass
