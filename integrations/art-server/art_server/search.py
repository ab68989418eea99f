"""Full-text search in a run's rollouts, by an index (SQLite's FTS5) in a temporary file that SQLite deletes when it is closed.

The run folder is never written. A search first adds what was finished or scored since the last one.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from art_core.store.schema import DAMAGED
from art_core.store.values import from_json
from art_server.plain import readable
from art_server.store_view import StoreView, read_snapshot

MAX_INDEXES = 8
"""Runs whose index is kept."""
AT_ONCE = 2_000
"""Rollouts that are read in one snapshot."""
INSTRUCTIONS = ("system", "developer")
"""Roles whose messages aren't searched: they are the same in most rollouts."""
NOT_TEXT = {"role", "type", "id", "tool_call_id"}
"""Keys whose values say how a message is built."""
TERMS = re.compile(r'"([^"]*)"|(\S+)')

FIELDS = "seq, rollout_id, task, output, error, finished"
NEW = f"SELECT {FIELDS} FROM rollouts WHERE seq > ? ORDER BY seq LIMIT {AT_ONCE}"
CHANGED = f"""
SELECT {FIELDS} FROM rollouts WHERE finished IS NOT NULL AND seq <= :last AND seq IN (
    SELECT value FROM json_each(:unfinished)
    UNION SELECT rollouts.seq FROM scores JOIN rollouts USING (rollout_id) WHERE scores.seq > :last_score
)
"""
"""Rollouts seen before that have finished, or were scored, since."""
MESSAGES = """
WITH RECURSIVE chain (id) AS (
    SELECT messages FROM calls WHERE rollout_id = :rollout AND NOT replaced
    UNION SELECT parent FROM messages JOIN chain USING (id) WHERE parent
)
SELECT blob FROM messages JOIN chain USING (id) UNION ALL SELECT response FROM calls WHERE rollout_id = :rollout AND NOT replaced
"""
NOTES = "SELECT notes FROM scores WHERE rollout_id = ? AND notes IS NOT NULL"


@dataclass(frozen=True)
class _State:
    """What has been read of a store."""

    last: int = 0
    """The newest rollout's number (``rollouts.seq``)."""
    last_id: str = ""
    """Its id: a new run in the same folder has another one."""
    last_score: int = 0
    unfinished: frozenset[int] = frozenset()


class Index:
    """The texts of one run's rollouts. For any thread."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._db = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._db.execute("CREATE VIRTUAL TABLE texts USING fts5 (text, tokenize = 'unicode61 remove_diacritics 2')")
        self._state = _State()

    def find(self, query: str) -> list[int]:
        """Return the numbers (``rollouts.seq``) of the finished rollouts that have all words of ``query``.

        Words in double quotes must follow each other, and the last word is a prefix. Raises StoreError like ``read_snapshot``.
        """
        terms = [phrase or word for phrase, word in TERMS.findall(query.replace("\0", " "))]
        quoted = ['"{}"'.format(term.replace('"', '""')) for term in terms if re.search(r"\w", term)]
        if not quoted:
            return []
        with self._lock:
            while self._add_new():
                pass
            rows = self._db.execute("SELECT rowid FROM texts WHERE texts MATCH ?", (" ".join(quoted) + "*",)).fetchall()
        return [seq for (seq,) in rows]

    def _add_new(self) -> bool:
        """Add what is new, at most ``AT_ONCE`` new rollouts; return whether there may be more.

        Nothing is added before the snapshot was read whole, because a read may fail or be repeated.
        """
        new = read_snapshot(self._store, lambda view: _read(view, self._state))
        self._db.execute("BEGIN")
        if new.started_anew:
            self._db.execute("DELETE FROM texts")
        for seq, text in new.texts.items():
            self._db.execute("DELETE FROM texts WHERE rowid = ?", (seq,))
            self._db.execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (seq, text))
        self._db.execute("COMMIT")
        self._state = new.state
        return new.more


class Indexes:
    """An index for each run that was searched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._indexes: dict[Path, Index] = {}

    def of(self, store: Path) -> Index:
        """Return the index of a store."""
        with self._lock:
            index = self._indexes.pop(store, None) or Index(store)
            self._indexes[store] = index  # the last one is the one used last
            while len(self._indexes) > MAX_INDEXES:
                del self._indexes[next(iter(self._indexes))]
            return index


@dataclass(frozen=True)
class _New:
    """What a snapshot has beyond a state."""

    state: _State
    texts: dict[int, str]
    """By rollout; those of rollouts that changed replace the earlier ones."""
    started_anew: bool
    """Whether it is another run than before."""
    more: bool
    """Whether there may be more new rollouts."""


def _read(view: StoreView, state: _State) -> _New:
    known = view.rows("SELECT rollout_id FROM rollouts WHERE seq = ?", (state.last,))
    started_anew = bool(state.last) and known != [(state.last_id,)]
    if started_anew:
        state = _State()
    new = view.rows(NEW, (state.last,))
    again = view.rows(CHANGED, {**vars(state), "unfinished": json.dumps(sorted(state.unfinished))})
    text_of = lru_cache(maxsize=4096)(lambda blob: _message_text(view, blob))
    finished = {row[0]: row for row in (*again, *new) if row[-1] is not None}
    [(last_score,)] = view.rows("SELECT coalesce(max(seq), 0) FROM scores")
    after = _State(
        last=new[-1][0] if new else state.last,
        last_id=new[-1][1] if new else state.last_id,
        last_score=last_score,
        unfinished=(state.unfinished | {row[0] for row in new}) - finished.keys(),
    )
    texts = {seq: _rollout_text(view, row, text_of) for seq, row in finished.items()}
    return _New(after, texts, started_anew, more=len(new) == AT_ONCE)


def _rollout_text(view: StoreView, row: tuple, text_of: Callable[[int], str]) -> str:
    """Return all texts of a rollout; those that can't be decoded are left out."""
    _, rollout_id, task, output, error, _ = row
    parts = [error or ""]
    for data in (task, output, *(notes for (notes,) in view.rows(NOTES, (rollout_id,)))):
        if data is not None:
            with suppress(*DAMAGED):
                parts += _texts(from_json(data))
    for (blob,) in view.rows(MESSAGES, {"rollout": rollout_id}):
        with suppress(*DAMAGED):
            parts.append(text_of(blob))
    return readable("\n".join(parts))


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
        for key, item in value.items():
            if key not in NOT_TEXT:
                yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)
