"""The tables of a run's SQLite file, how it is opened, and which types its columns have."""

from __future__ import annotations

import re
import sqlite3
import time
from pathlib import Path
from typing import Any

from art_core.errors import StoreError

VERSION = 6
"""In ``PRAGMA user_version``; a file of another version is refused."""
APPLICATION = 0x61727431
LOCKED_SECONDS = 30.0
"""How long a statement waits for another process or thread that has locked the file."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL);

-- Messages, tools, settings and answers as JSON, each stored once.
CREATE TABLE blobs (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, json BLOB NOT NULL);

-- A conversation is a path of messages, so that a longer one adds only what is new.
CREATE TABLE messages (
    id INTEGER PRIMARY KEY, parent INTEGER NOT NULL, blob INTEGER NOT NULL, UNIQUE (parent, blob)
);

-- continues: the interrupted rollout whose answers this one replayed. exact: whether output is exactly what the agent
-- returned, null if unknown.
CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL UNIQUE, step INTEGER, split TEXT, task_id TEXT, task BLOB, grp TEXT,
    started REAL NOT NULL, finished REAL, output BLOB, error TEXT, seconds REAL, continues TEXT, exact INTEGER
);
CREATE INDEX rollouts_by_step ON rollouts (step, split);

-- prompt = (prompt and sampled ids of the parent call)[:shared] + suffix. Ids are int32; logprobs are float32 if that is
-- exact, else float64. AUTOINCREMENT: SQLite then remembers how many rows there have been. digest: digest.py.
CREATE TABLE calls (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB NOT NULL, rollout_id TEXT NOT NULL, replaced INTEGER NOT NULL DEFAULT 0,
    parent INTEGER, shared INTEGER NOT NULL, suffix BLOB NOT NULL, sampled BLOB NOT NULL, logprobs BLOB NOT NULL,
    forced BLOB NOT NULL, policy_version INTEGER NOT NULL, agent TEXT, thread TEXT, request_id TEXT NOT NULL,
    choice INTEGER NOT NULL, reward REAL, temperature REAL NOT NULL, finish_reason TEXT NOT NULL,
    messages INTEGER NOT NULL, tools INTEGER, settings INTEGER NOT NULL, response INTEGER NOT NULL, usage BLOB
);
CREATE INDEX calls_by_rollout ON calls (rollout_id, seq);
-- A retry looks up the call that it replaces.
CREATE INDEX calls_by_request ON calls (rollout_id, request_id);

-- Scores and steps are only ever added; a rollout's newest score that is not aside counts.
CREATE TABLE scores (
    seq INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL, reward REAL, metrics BLOB NOT NULL, advantage REAL, scored_by TEXT,
    at REAL NOT NULL, notes BLOB, aside INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX scores_by_rollout ON scores (rollout_id, seq);
CREATE TABLE steps (seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, metrics BLOB NOT NULL, at REAL NOT NULL);

-- updates.trained: JSON [[rollout_id, digests of its calls in hex], ...], rollout_id null if this file lacks the rollout.
-- openings.version: the weights with which the run resumed.
CREATE TABLE updates (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, step INTEGER NOT NULL, version INTEGER NOT NULL, targets REAL, trained BLOB NOT NULL
);
CREATE TABLE openings (seq INTEGER PRIMARY KEY, version INTEGER NOT NULL, at REAL NOT NULL);
"""
DAMAGED = (TypeError, ValueError, LookupError)
"""What the content of a damaged file may raise where it is decoded."""
BROKEN = (sqlite3.Error, *DAMAGED)
"""What reading a damaged file may raise; ``unreadable`` makes a StoreError of it."""

_DECLARED = re.findall(r"(\w+) (INTEGER|REAL|TEXT|BLOB)( NOT NULL| PRIMARY KEY)?", TABLES)
_KINDS = {name: {"INTEGER": int, "REAL": float, "TEXT": str, "BLOB": bytes}[kind] for name, kind, _ in _DECLARED}
_NULLABLE = {name for name, _, constraint in _DECLARED if not constraint} | {"started", "metrics"}
"""``started`` and ``metrics`` are null if a LEFT JOIN finds no row."""


def typed_row(cursor: sqlite3.Cursor, values: tuple) -> tuple:
    """Row factory that raises ValueError for a value of another type than its column's, which SQLite may well hold.

    Expressions are not checked. Text stored as bytes (``text_to_column``) is decoded.
    """
    row: list[Any] = []
    for (name, *_), value in zip(cursor.description, values, strict=True):
        kind = _KINDS.get(name)
        if kind is str and isinstance(value, bytes):
            value = value.decode("utf-8", "surrogatepass")
        if kind is not None and not (isinstance(value, kind) or (value is None and name in _NULLABLE)):
            raise ValueError(f"{name} must be {kind.__name__}, got {value!r:.100} in the row of {values[0]!r:.100}")
        row.append(value)
    return tuple(row)


def connect(path: Path) -> sqlite3.Connection:
    """Open the file for one thread at a time, and create its tables if it is new.

    Raises StoreError if the file is not a run's store, has another version, or cannot be opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=LOCKED_SECONDS, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot open {path}: {error}; check that the folder exists and is writable") from error
    try:
        _prepare(connection, path)
    except BROKEN as error:
        connection.close()
        raise unreadable(path, error) from error
    except StoreError:
        connection.close()
        raise
    return connection


def check_version(connection: sqlite3.Connection, path: Path) -> None:
    """Raise StoreError if the file is not a run's store, or has another version."""
    [application] = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION:
        raise StoreError(f"{path} is an SQLite file, but not an art store; pass another run folder")
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if version != VERSION:
        raise StoreError(
            f"{path} has version {version} of the store's tables, this art_core reads version {VERSION}; use the art_core that "
            "wrote it, or another run folder"
        )


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    if connection.execute("PRAGMA user_version").fetchone() == (0,):
        _create(connection, path)
    check_version(connection, path)
    # Not part of a version: a file without it is only slower to read.
    connection.execute("CREATE INDEX IF NOT EXISTS rollouts_by_group ON rollouts (grp)")
    # A commit survives the end of this process, even by a kill; Store.sync makes it survive a power loss.
    connection.execute("PRAGMA synchronous = NORMAL")


def _create(connection: sqlite3.Connection, path: Path) -> None:
    has_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,)
    # Another process may have created ours since the version was read; tables and version are committed together.
    if has_tables and connection.execute("PRAGMA user_version").fetchone() == (0,):
        raise StoreError(f"{path} is an SQLite file, but not an art store; pass another run folder")
    _use_write_ahead_log(connection)
    connection.execute("BEGIN IMMEDIATE")
    if connection.execute("PRAGMA user_version").fetchone() == (0,):
        for statement in (*TABLES.split(";\n"), f"PRAGMA application_id = {APPLICATION}"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Retry for LOCKED_SECONDS: while another process writes, this statement fails at once instead of waiting."""
    until = time.monotonic() + LOCKED_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until:
                raise
        time.sleep(0.01)


def unreadable(path: Path, error: Exception) -> StoreError:
    """Return the StoreError for ``error``, one of ``BROKEN``, that opening or reading the file raised."""
    if not isinstance(error, sqlite3.Error) or "not a database" in str(error) or "malformed" in str(error):
        return StoreError(f"{path} is damaged or not a run's store ({error}); pass another run folder")
    return StoreError(f"cannot read {path}: {error}; check the disk and the file's permissions")
