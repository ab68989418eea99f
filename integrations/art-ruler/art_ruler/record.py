"""The costs of judging, and the cached verdicts, in one SQLite file.

Every request is a row with its tokens and its cost, so a resumed run knows what it has spent. A group's verdict is stored under a
key that covers everything that decides its scores.
"""

from __future__ import annotations

import json
import sqlite3
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from art_core.errors import StoreError

__all__ = ["Record"]

VERSION = 1
"""Stored in ``PRAGMA user_version``."""
TABLES = """
CREATE TABLE IF NOT EXISTS answers (
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, asked_by TEXT NOT NULL, input_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL, cost REAL, seconds REAL NOT NULL, fault TEXT, failed INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, verdict TEXT NOT NULL);
"""
COLUMNS = "at, asked_by, input_tokens, output_tokens, cost, seconds, fault, failed"
TOTALS = ("requests", "failed", "faults", "input_tokens", "output_tokens", "cost", "unpriced")
"""Number of requests, of unanswered requests and of unusable answers; tokens; US dollars, as far as they are known; number
of answers of unknown cost."""
SUMS = (
    "count(*), total(failed), count(fault) - total(failed), total(input_tokens), total(output_tokens), total(cost), "
    "total(cost IS NULL AND NOT failed)"
)


class Record:
    """``judge.sqlite`` of a run, or a cache that several runs share; without a path, in memory."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises StoreError if the file cannot be opened or is not a record."""
        self._path = path
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path or ":memory:", timeout=30, isolation_level=None, check_same_thread=False)
            weakref.finalize(self, self._db.close)
            self._prepare()
        except StoreError:
            raise
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot open the judge's record {path}: {error}; pass another file") from error

    def _prepare(self) -> None:
        [version] = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            raise StoreError(f"{self._path} is not a judge's record of version {VERSION}; pass another file")
        self._db.execute("PRAGMA journal_mode = WAL")
        # After a machine crash, at worst a few groups are judged again.
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.executescript(TABLES)
        self._db.execute(f"PRAGMA user_version = {VERSION}")

    def totals(self, by: str) -> dict[str, float]:
        """Return the totals (see ``TOTALS``) of all requests made under this name."""
        rows = self._execute(f"SELECT {SUMS} FROM answers WHERE asked_by = ?", (by,))
        return dict(zip(TOTALS, map(float, rows[0]), strict=True))

    def add(
        self, by: str, seconds: float, *, tokens: tuple[int, int] = (0, 0), cost: float | None = None,
        fault: str | None = None, failed: bool = False,
    ) -> None:  # fmt: skip
        """Add a request: ``fault`` says why its answer was unusable or, with ``failed``, why there was none."""
        row = (time.time(), by, *tokens, cost, seconds, fault, failed)
        self._execute(f"INSERT INTO answers ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    def verdict(self, key: str) -> Any | None:
        """Return the verdict stored under the key, or None."""
        rows = self._execute("SELECT verdict FROM verdicts WHERE key = ?", (key,))
        return json.loads(rows[0][0]) if rows else None

    def keep(self, key: str, verdict: Mapping[str, Any]) -> None:
        """Store a JSON-able verdict under a key."""
        self._execute("INSERT OR REPLACE INTO verdicts (key, verdict) VALUES (?, ?)", (key, json.dumps(verdict)))

    def _execute(self, sql: str, values: tuple) -> list[tuple]:
        """Return the rows. Raises StoreError if the file cannot be read or written any more."""
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            where = self._path or "(in memory)"
            raise StoreError(
                f"cannot use the judge's record {where}: {error}; free disk space, fix its permissions, or move it away"
            ) from error
