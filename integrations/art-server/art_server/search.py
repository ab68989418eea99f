"""Full-text search in a run's rollouts, by an index (SQLite's FTS5) in a temporary file that SQLite deletes when it is closed.

The run folder is never written. A search first adds what has finished since the last one.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from art_core.store.values import from_json
from art_server.store_view import StoreView

MAX_INDEXES = 8
"""Runs whose index is kept."""
INSTRUCTIONS = ("system", "developer")
"""Roles whose messages aren't searched: they are the same in most rollouts."""
TERMS = re.compile(r'"([^"]*)"|(\S+)')

NEW = "SELECT seq, rollout_id, task, output, error, finished FROM rollouts WHERE seq > ? ORDER BY seq"
FINISHED = (
    "SELECT seq, rollout_id, task, output, error, finished FROM rollouts "
    "WHERE seq IN (SELECT value FROM json_each(?)) AND finished IS NOT NULL"
)
MESSAGES = """
WITH RECURSIVE chain (id) AS (
    SELECT messages FROM calls WHERE rollout_id = :rollout AND NOT replaced
    UNION SELECT parent FROM messages JOIN chain USING (id) WHERE parent
)
SELECT blob FROM messages JOIN chain USING (id) UNION ALL SELECT response FROM calls WHERE rollout_id = :rollout AND NOT replaced
"""
NOTES = "SELECT notes FROM scores WHERE rollout_id = ? AND notes IS NOT NULL"


class Index:
    """The texts of one run's rollouts. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._db = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._db.execute(
            "CREATE VIRTUAL TABLE texts USING fts5 (text, content = '', tokenize = 'unicode61 remove_diacritics 2')"
        )
        self._last = 0
        self._unfinished: set[int] = set()

    def find(self, view: StoreView, query: str) -> list[int]:
        """Return the numbers (``rollouts.seq``) of the finished rollouts that have all words of ``query``.

        Words in double quotes must follow each other, and the last word is a prefix.
        """
        terms = [phrase or word for phrase, word in TERMS.findall(query)]
        quoted = ['"{}"'.format(term.replace('"', '""')) for term in terms if re.search(r"\w", term)]
        if not quoted:
            return []
        with self._lock:
            self._add_new(view)
            rows = self._db.execute("SELECT rowid FROM texts WHERE texts MATCH ?", (" ".join(quoted) + "*",)).fetchall()
        return [seq for (seq,) in rows]

    def _add_new(self, view: StoreView) -> None:
        text_of = lru_cache(maxsize=4096)(lambda blob: _message_text(view, blob))
        rows = view.rows(FINISHED, (json.dumps(sorted(self._unfinished)),)) + view.rows(NEW, (self._last,))
        self._db.execute("BEGIN")
        try:
            for seq, rollout_id, task, output, error, finished in rows:
                if finished is None:
                    self._unfinished.add(seq)
                else:
                    self._unfinished.discard(seq)
                    notes = [note for (note,) in view.rows(NOTES, (rollout_id,))]
                    texts = [*_texts(from_json(task)), error or ""]
                    texts += [text for data in (output, *notes) if data is not None for text in _texts(from_json(data))]
                    texts += [text_of(blob) for (blob,) in view.rows(MESSAGES, {"rollout": rollout_id})]
                    self._db.execute(
                        "INSERT INTO texts (rowid, text) VALUES (?, ?)", (seq, _encodable("\n".join(texts)))
                    )
                self._last = max(self._last, seq)
        finally:
            self._db.execute("COMMIT")


class Indexes:
    """An index for each run that was searched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._indexes: dict[tuple[str, int], Index] = {}

    def of(self, store: Path) -> Index:
        """Return the index of a store, new for a file that replaced another one."""
        key = str(store), store.stat().st_ino
        with self._lock:
            index = self._indexes.pop(key, None) or Index()
            self._indexes[key] = index  # the last one is the one used last
            while len(self._indexes) > MAX_INDEXES:
                del self._indexes[next(iter(self._indexes))]
            return index


def _message_text(view: StoreView, blob: int) -> str:
    [(data,)] = view.rows("SELECT json FROM blobs WHERE id = ?", (blob,))
    message = from_json(data)
    if isinstance(message, Mapping) and message.get("role") in INSTRUCTIONS:
        return ""
    return "\n".join(_texts(message))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value, without the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
