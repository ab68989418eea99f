"""One thread that writes to a run's file: writes that arrive during a commit, or within a few milliseconds, share the next.

Nothing accepted is dropped: what the disk refuses stays in memory and is tried again at the next flush. Only a write that fails
by its own fault is left out, and reported, because it would block all others.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from art_core.errors import StoreError
from art_core.store.schema import connect

logger = logging.getLogger("art_core.store")

Write = Callable[[sqlite3.Connection], object]
"""Runs in an open transaction."""

GATHER_SECONDS = 0.02
"""How long a write that nobody awaits may wait for others to share its commit."""


class Writer:
    """``put`` never waits for the disk. After a failed transaction ``forget`` is called: what writes cached may be undone."""

    def __init__(self, path: Path, forget: Callable[[], None]) -> None:
        self._path = path
        self._forget = forget
        self._changed = threading.Condition()
        self._waiting: list[Write] = []
        self._awaited: list[Future[None]] = []
        """Each resolves with the batch that has all writes put before it; one of these ends the gathering."""
        self._writing = 0
        self._error: StoreError | None = None
        """Why the last batch failed; it is tried again when somebody awaits it."""
        self._left_out: list[Exception] = []
        """Why writes were left out, until a flush reports it."""
        self._closing = False
        self._thread: threading.Thread | None = None

    def put(self, write: Write) -> None:
        """Accept a write, even after a failure, which ``flush`` reports. Raises StoreError after ``close``."""
        with self._changed:
            if self._closing:
                raise StoreError(f"{self._path} was closed; open the store again to write")
            self._waiting.append(write)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="art-store", daemon=True)
                self._thread.start()
            elif len(self._waiting) == 1:
                self._changed.notify_all()

    def is_behind(self, most: int) -> bool:
        """Return whether more than ``most`` writes are not on disk yet, or the next flush has a failure to retry or report."""
        return self._backlog() > most or self._error is not None or bool(self._left_out)

    def _backlog(self) -> int:
        return len(self._waiting) + self._writing

    def saved(self) -> Future[None]:
        """Return a future that resolves once all earlier writes are committed or left out. Retries after a failure; the future
        gets a StoreError if the retry fails too."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # not cancellable: the writer resolves it
        with self._changed:
            if self._backlog():
                self._awaited.append(future)
                self._changed.notify_all()
            else:
                future.set_result(None)
        return future

    def flush(self) -> None:
        """Wait for ``saved``. Raises its StoreError, and one StoreError for the writes left out since the last flush."""
        self.saved().result()
        with self._changed:
            left_out, self._left_out = self._left_out, []
        if left_out:
            raise StoreError(
                f"{len(left_out)} records can't be written to {self._path} and were skipped; all others were saved; "
                f"the first failed with {left_out[0]!r}: fix whatever passes such a value"
            ) from left_out[0]

    def close(self) -> None:
        """Flush and end the thread. If the flush fails nothing is closed, so that it can be tried again."""
        self.flush()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        connection: sqlite3.Connection | None = None
        while batch := self._next_batch():
            writes, awaited = batch
            error: StoreError | None = None
            try:
                connection = connection or connect(self._path)
                self._write(connection, writes)
            except Exception as failure:  # noqa: BLE001  the thread's boundary: flush raises it
                error = StoreError(
                    f"cannot write to {self._path}: {failure}; nothing that was recorded before is lost, and {len(writes)} "
                    "records wait in memory: free space on the disk (or make the file writable) and flush again"
                )
                self._forget()
                if connection is not None:
                    connection.close()
                    connection = None
            with self._changed:
                self._waiting[:0] = writes
                self._writing = 0
                self._error = error
            for future in awaited:
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error.with_traceback(None))
        if connection is not None:
            connection.close()

    def _next_batch(self) -> tuple[list[Write], list[Future[None]]] | None:
        """Wait for writes and for who awaits them; None when it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._awaited or self._closing or (self._waiting and not self._error))
            if not self._awaited and not self._closing:
                self._changed.wait_for(lambda: self._awaited or self._closing, GATHER_SECONDS)
            if self._closing and not self._awaited and (self._error or not self._waiting):
                return None
            writes, self._waiting = self._waiting, []
            awaited, self._awaited = self._awaited, []
            self._writing = len(writes)
            return writes, awaited

    def _write(self, connection: sqlite3.Connection, writes: list[Write]) -> None:
        """Commit the writes together, else one by one, and remove from the list what is committed or left out. Raises what the
        disk or the file is to blame for."""
        try:
            _commit(connection, writes)
        except Exception as failure:
            self._forget()
            if _may_pass(failure):
                raise
            if len(writes) > 1:
                while writes:
                    self._write(connection, writes[:1])
                    del writes[0]
            else:
                logger.exception("a record can never be written to %s and is left out", self._path)
                self._left_out.append(failure)
        writes.clear()


def _may_pass(failure: Exception) -> bool:
    """Whether the file or the machine is to blame, not the write itself."""
    passing = sqlite3.OperationalError | sqlite3.InternalError | StoreError | OSError | MemoryError
    # SQLite reports a damaged file as a plain DatabaseError.
    return isinstance(failure, passing) or type(failure) is sqlite3.DatabaseError


def _commit(connection: sqlite3.Connection, writes: list[Write]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        for write in writes:
            write(connection)
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # SQLite rolls back by itself if the disk is full
            connection.execute("ROLLBACK")
        raise
