"""The tables of a run's SQLite file, and how the file is opened. Knows nothing about who writes them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from art_core.errors import StoreError
from art_core.store.values import Damaged

VERSION = 5
"""In ``PRAGMA user_version``; a file of another version is refused."""
APPLICATION = 0x61727431

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL);

-- Content by its digest, each once: messages, tools, settings, answers. JSON.
CREATE TABLE blobs (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, json BLOB NOT NULL);

-- A conversation is a path of messages, so that a longer one adds only what is new.
CREATE TABLE messages (
    id INTEGER PRIMARY KEY, parent INTEGER NOT NULL, blob INTEGER NOT NULL, UNIQUE (parent, blob)
);

-- continues: the rollout of a process that ended, whose answers this one began with. exact: whether output is the very value
-- that the agent returned, null where that is not known.
CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL UNIQUE, step INTEGER, split TEXT, task_id TEXT, task BLOB, grp TEXT,
    started REAL NOT NULL, finished REAL, output BLOB, error TEXT, seconds REAL, continues TEXT, exact INTEGER
);
CREATE INDEX rollouts_by_step ON rollouts (step, split);

-- prompt = (prompt and sampled ids of the parent call)[:shared] + suffix. Ids are int32; log-probabilities are float32
-- where that loses nothing, else float64. AUTOINCREMENT: SQLite then remembers how many there have been. digest: digest.py.
CREATE TABLE calls (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB NOT NULL, rollout_id TEXT NOT NULL, replaced INTEGER NOT NULL DEFAULT 0,
    parent INTEGER, shared INTEGER NOT NULL, suffix BLOB NOT NULL, sampled BLOB NOT NULL, logprobs BLOB NOT NULL,
    forced BLOB NOT NULL, policy_version INTEGER NOT NULL, agent TEXT, thread TEXT, request_id TEXT NOT NULL,
    choice INTEGER NOT NULL, reward REAL, temperature REAL NOT NULL, finish_reason TEXT NOT NULL,
    messages INTEGER NOT NULL, tools INTEGER, settings INTEGER NOT NULL, response INTEGER NOT NULL
);
CREATE INDEX calls_by_rollout ON calls (rollout_id, seq);
-- For the retry that looks for the call that it replaces.
CREATE INDEX calls_by_request ON calls (rollout_id, request_id);

-- Scores and steps are only ever added; a rollout's newest score that is not set aside counts. notes: JSON.
CREATE TABLE scores (
    seq INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL, reward REAL, metrics BLOB NOT NULL, advantage REAL, scored_by TEXT,
    at REAL NOT NULL, notes BLOB, aside INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX scores_by_rollout ON scores (rollout_id, seq);
CREATE TABLE steps (seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, metrics BLOB NOT NULL, at REAL NOT NULL);

-- What an optimizer step was given: JSON [[rollout_id or null, digests of its calls], ...], null where this file has no such
-- rollout. AUTOINCREMENT as above. Each time the run was opened: the version of the weights that it went on with.
CREATE TABLE updates (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, step INTEGER NOT NULL, version INTEGER NOT NULL, targets REAL, trained BLOB NOT NULL
);
CREATE TABLE openings (seq INTEGER PRIMARY KEY, version INTEGER NOT NULL, at REAL NOT NULL);
"""
BROKEN = (sqlite3.Error, UnicodeError, Damaged)
"""What reading a file raises that is damaged; UnicodeError where SQLite's own complaint quotes it."""


def connect(path: Path) -> sqlite3.Connection:
    """Open the file for one thread at a time, and make its tables where it is new.

    Raises StoreError for a file that is not a run's store, one of another version, and one that cannot be opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"cannot open {path}: {error}; check that the folder exists and may be written") from error
    try:
        _prepare(connection, path)
    except BROKEN as error:
        connection.close()
        raise unreadable(path, error) from error
    except StoreError:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        _create(connection, path)
    [application] = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION:
        raise StoreError(f"{path} is an SQLite file of something else than art; give another run folder")
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if version != VERSION:
        raise StoreError(
            f"{path} was written with version {version} of the store's tables, this art_core reads version {VERSION}; use the "
            "art_core that wrote it, or another run folder"
        )
    # Not part of a version: a file without it is read all the same, only slower.
    connection.execute("CREATE INDEX IF NOT EXISTS rollouts_by_group ON rollouts (grp)")
    # What is committed survives this process, also where it is killed; Store.sync makes it survive a loss of power.
    connection.execute("PRAGMA synchronous = NORMAL")


def _create(connection: sqlite3.Connection, path: Path) -> None:
    filled = connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,)
    # Another process may have made ours since the version was read; tables and version come together.
    if filled and connection.execute("PRAGMA user_version").fetchone() == (0,):
        raise StoreError(f"{path} is an SQLite file of something else than art; give another run folder")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    # Another process may have been faster.
    if connection.execute("PRAGMA user_version").fetchone() == (0,):
        for statement in (*TABLES.split(";\n"), f"PRAGMA application_id = {APPLICATION}"):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")


def unreadable(path: Path, error: Exception) -> StoreError:
    """Return the error for a file that cannot be opened or read; ``error`` is of ``BROKEN``."""
    if isinstance(error, ValueError) or "not a database" in str(error) or "malformed" in str(error):
        return StoreError(f"{path} is not a run's store, or it is damaged ({error}); give another run folder")
    return StoreError(f"cannot read {path}: {error}; check the disk and that the file may be read and written")
