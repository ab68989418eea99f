"""One thread that writes to a run's file: what comes while it commits, or within a few milliseconds, shares the next commit.

Knows nothing about what is written: a write is a function of an open transaction. Nothing taken is given up: what the disk
does not take stays in memory and is tried again at the next flush. Only a write that fails by itself, whatever the disk, is left
out, and told: it would hold up all others for ever.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from art_core.errors import StoreError
from art_core.store.schema import connect

logger = logging.getLogger("art_core.store")

Write = Callable[[sqlite3.Connection], object]

GATHER_SECONDS = 0.02
"""How long a write that nobody waits for may wait for others to share its commit."""


class Writer:
    """``put`` never waits for the disk; ``saved`` comes true, and ``flush`` returns, when all that was put is committed.

    ``forget`` is called after a failed transaction, with whatever its writes may have remembered about it undone.
    """

    def __init__(self, path: Path, forget: Callable[[], None]) -> None:
        self._path = path
        self._forget = forget
        self._changed = threading.Condition()
        self._waiting: list[Write] = []
        self._writing = 0
        self._taken = self._ended = 0
        """Writes that were ever put, and those of them that are committed or left out."""
        self._awaited: list[tuple[int, concurrent.futures.Future[None]]] = []
        """(writes that must have ended, who is told then); whoever waits ends the gathering."""
        self._error: StoreError | None = None
        self._left_out: list[Exception] = []
        """Why writes were left out, until a flush has told it."""
        self._closing = False
        self._thread: threading.Thread | None = None

    def put(self, write: Write) -> None:
        """Take a write, even where an earlier one has failed: ``flush`` tells that. Raises StoreError after ``close``."""
        with self._changed:
            if self._closing:
                raise StoreError(f"{self._path} was closed; open the store again to write")
            self._waiting.append(write)
            self._taken += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="art-store", daemon=True)
                self._thread.start()
            elif len(self._waiting) == 1:
                self._changed.notify_all()

    @property
    def backlog(self) -> int:
        """Writes taken that are not on disk yet."""
        return len(self._waiting) + self._writing

    @property
    def failed(self) -> bool:
        """Whether the next flush has a failure to try again or to tell."""
        return self._error is not None or bool(self._left_out)

    def saved(self) -> concurrent.futures.Future[None]:
        """Return what comes true when everything that was put before is committed, or was left out; an earlier failure is tried
        again. It raises StoreError where that stays."""
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # others may wait for the same commit, so it cannot be cancelled
        with self._changed:
            if self._ended >= self._taken:
                future.set_result(None)
            else:
                self._error = None
                self._awaited.append((self._taken, future))
                self._changed.notify_all()
        return future

    def flush(self) -> None:
        """Return when ``saved`` comes true. Raises StoreError where it does, and once for writes that were left out."""
        self.saved().result()
        with self._changed:
            left_out, self._left_out = self._left_out, []
        if left_out:
            raise StoreError(
                f"{len(left_out)} records can never be written to {self._path} and were left out, all others are there; "
                f"the first failed with {left_out[0]!r}: mend whatever gave such a value"
            ) from left_out[0]

    def close(self) -> None:
        """Flush and end the thread. Where the flush fails nothing is closed, so that it can be tried again."""
        self.flush()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        connection: sqlite3.Connection | None = None
        while writes := self._gathered():
            error: StoreError | None = None
            try:
                connection = connection or connect(self._path)
                self._write(connection, writes)
            except Exception as failure:  # noqa: BLE001  the thread's boundary: flush raises it
                error = self._explained(failure, len(writes))
                self._forget()
                if connection is not None:
                    connection.close()
                    connection = None
            with self._changed:
                self._ended += self._writing
                self._writing = 0
                if error is not None:
                    self._ended -= len(writes)
                    self._waiting[:0] = writes
                self._error = error
                told = self._told()
            for future in told:
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error.with_traceback(None))
        if connection is not None:
            connection.close()

    def _told(self) -> list[concurrent.futures.Future[None]]:
        """Return those who wait for nothing more; after a failure these are all."""
        ended = [it for it in self._awaited if self._error is not None or it[0] <= self._ended]
        self._awaited = [it for it in self._awaited if it not in ended]
        return [future for _, future in ended]

    def _write(self, connection: sqlite3.Connection, writes: list[Write]) -> None:
        """Commit the writes together, or else one by one; where this raises, ``writes`` are those still to be tried again."""
        try:
            _commit(connection, writes)
        except Exception as failure:
            self._forget()
            if _may_pass(failure):
                raise
            if len(writes) == 1:
                logger.exception("a record can never be written to %s and is left out", self._path)
                self._left_out.append(failure)
                return
            while writes:
                self._write(connection, writes[:1])
                del writes[0]

    def _gathered(self) -> list[Write]:
        """Return the next writes; none when it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: (self._waiting and self._error is None) or self._closing)
            if not self._awaited and not self._closing:
                self._changed.wait_for(lambda: self._awaited or self._closing, GATHER_SECONDS)
            writes, self._waiting = self._waiting, []
            self._writing = len(writes)
            return writes

    def _explained(self, failure: Exception, count: int) -> StoreError:
        return StoreError(
            f"cannot write to {self._path}: {failure}; nothing that was recorded before is lost, and {count} records wait in "
            "memory: free space on the disk (or make the file writable) and they are written at the next flush"
        )


def _may_pass(failure: Exception) -> bool:
    """Whether the file or the machine is to blame, not the write itself."""
    # What SQLite has no name for, such as a damaged file, is a plain DatabaseError.
    if type(failure) is sqlite3.DatabaseError:
        return True
    return isinstance(failure, sqlite3.OperationalError | sqlite3.InternalError | StoreError | OSError | MemoryError)


def _commit(connection: sqlite3.Connection, writes: list[Write]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        for write in writes:
            write(connection)
        connection.execute("COMMIT")
    except BaseException:
        # SQLite may have rolled back by itself, as it does when the disk is full.
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise
