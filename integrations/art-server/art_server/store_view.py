"""A run's file as it stands, for looking at it while others write: nothing is opened for writing, so nothing is changed.

``look`` opens the file, asks one question as of one moment, and closes it. What may be many is given in pages. Knows nothing
about how a run goes, or who looks.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from art_core.errors import StoreError
from art_core.store.calls import CallReader
from art_core.store.rollouts import COLUMNS, SCORED, SCORES, StoredRollout, StoredScore, rollout_of, score_of
from art_core.store.schema import BROKEN, check_version, typed_row, unreadable
from art_core.store.values import from_json, object_from_json
from art_core.types import Call

Answer = TypeVar("Answer")

ATTEMPTS = 5
"""Of a look at a file that nobody had open when it began, and that somebody began to write meanwhile."""
GROUP = "coalesce(grp, rollouts.rollout_id)"
"""A run that is compared with no other is a group of its own."""
WANTED = f"""
(:split IS NULL OR split = :split) AND (:step IS NULL OR step = :step) AND (:task_id IS NULL OR task_id = :task_id)
AND (:group IS NULL OR {GROUP} = :group)
"""


@dataclass(frozen=True)
class Wanted:
    """Which rollouts; None takes all."""

    split: str | None = None
    step: int | None = None
    task_id: str | None = None
    group: str | None = None


@dataclass(frozen=True)
class SeenRollout:
    """A rollout with what its calls add up to."""

    rollout: StoredRollout
    started: float
    """Unix time."""
    scored: bool
    """Whether it has a score, one that gives no reward too."""
    calls: int
    """Without those that a retry replaced."""
    sampled_tokens: int


@dataclass(frozen=True)
class SeenTask:
    """A task by what was made of it."""

    task_id: str
    task: Any
    rollouts: int
    first_step: int | None
    last_step: int | None


@dataclass(frozen=True)
class SeenSplit:
    """The rollouts of one split."""

    split: str | None
    rollouts: int
    last_step: int | None


class StoreView:
    """What a question may be asked. Made by ``look``."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def meta(self, key: str, default: Any = None) -> Any:
        """Return what ``Store.set_meta`` kept under a key."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else from_json(row[0])

    def step_counts(self) -> tuple[int, int | None]:
        """Return how many steps there are, and the last; None where there is none."""
        return self._db.execute("SELECT count(DISTINCT step), max(step) FROM steps").fetchone()

    def steps(self, *, after: int, limit: int) -> list[tuple[int, float, dict[str, float]]]:
        """Return (step, Unix time, metrics) of the steps ``after`` one, in order; of one that was done again, the last."""
        rows = self._db.execute(
            "SELECT step, at, metrics FROM steps WHERE seq IN "
            "(SELECT max(seq) FROM steps WHERE step > ? GROUP BY step ORDER BY step LIMIT ?) ORDER BY step",
            (after, limit),
        )
        return [(step, at, object_from_json(metrics)) for step, at, metrics in rows]

    def splits(self) -> list[SeenSplit]:
        """Return the splits that there are."""
        rows = self._db.execute("SELECT split, count(*), max(step) FROM rollouts GROUP BY split ORDER BY split")
        return [SeenSplit(*row) for row in rows]

    def progress(self, step: int, split: str) -> tuple[int, int]:
        """Return how many rollouts of a step have begun, and how many have ended."""
        return self._db.execute(
            "SELECT count(*), count(finished) FROM rollouts WHERE step = ? AND split = ?", (step, split)
        ).fetchone()

    def rollouts(
        self, wanted: Wanted, *, limit: int, offset: int, newest_first: bool = True
    ) -> tuple[int, list[SeenRollout]]:
        """Return how many are wanted, and a page of them by when they began."""
        values = {**vars(wanted), "limit": limit, "offset": offset}
        [total] = self._db.execute(f"SELECT count(*) FROM rollouts WHERE {WANTED}", values).fetchone()
        order = "DESC" if newest_first else "ASC"
        page = f"SELECT seq FROM rollouts WHERE {WANTED} ORDER BY seq {order} LIMIT :limit OFFSET :offset"
        return total, self._seen(f"rollouts.seq IN ({page}) ORDER BY rollouts.seq {order}", values)

    def groups(self, wanted: Wanted, *, limit: int, offset: int) -> tuple[int, list[list[SeenRollout]]]:
        """Return how many groups are wanted, and a page of them, the newest first, each in the order in which it began."""
        values = {**vars(wanted), "limit": limit, "offset": offset}
        [total] = self._db.execute(f"SELECT count(DISTINCT {GROUP}) FROM rollouts WHERE {WANTED}", values).fetchone()
        page = self._db.execute(
            f"SELECT {GROUP} AS name, min(seq), max(seq) FROM rollouts WHERE {WANTED} GROUP BY name "
            "ORDER BY min(seq) DESC LIMIT :limit OFFSET :offset",
            values,
        ).fetchall()
        found: dict[str, list[SeenRollout]] = {name: [] for name, _, _ in page}
        if page:
            # There is no index by group; the rows of a page lie together.
            first, last = min(low for _, low, _ in page), max(high for _, _, high in page)
            for seen in self._seen(
                f"rollouts.seq BETWEEN ? AND ? AND {GROUP} IN ({_places(page)}) ORDER BY rollouts.seq",
                (first, last, *found),
            ):
                _asked(found, seen.rollout.group or seen.rollout.rollout_id).append(seen)
        return total, list(found.values())

    def tasks(self, *, split: str | None, limit: int, offset: int) -> tuple[int, list[SeenTask]]:
        """Return how many tasks there are, and a page of them, those that were run in most different steps first."""
        values = {"split": split, "limit": limit, "offset": offset}
        where = "task_id IS NOT NULL AND (:split IS NULL OR split = :split)"
        [total] = self._db.execute(f"SELECT count(DISTINCT task_id) FROM rollouts WHERE {where}", values).fetchone()
        rows = self._db.execute(
            f"SELECT task_id, min(seq), count(*), min(step), max(step) FROM rollouts WHERE {where} GROUP BY task_id "
            "ORDER BY count(DISTINCT step) DESC, min(seq) LIMIT :limit OFFSET :offset",
            values,
        ).fetchall()
        texts = dict(
            self._db.execute(f"SELECT seq, task FROM rollouts WHERE seq IN ({_places(rows)})", [row[1] for row in rows])
        )
        return total, [SeenTask(task_id, from_json(_asked(texts, seq)), *rest) for task_id, seq, *rest in rows]

    def rollout(self, rollout_id: str) -> SeenRollout | None:
        """Return one, None where there is none."""
        return next(iter(self._seen("rollouts.rollout_id = ?", (rollout_id,))), None)

    def calls(self, rollout_id: str) -> tuple[Call, ...]:
        """Return a rollout's calls as ``Store.calls`` does."""
        return CallReader(self._db, rollout_id).calls()

    def call_rewards(self, rollout_ids: Sequence[str]) -> dict[str, list[tuple[str | None, float | None]]]:
        """Return (agent, reward) of every call, by rollout, in the order of ``calls``."""
        found: dict[str, list[tuple[str | None, float | None]]] = {it: [] for it in rollout_ids}
        for rollout_id, agent, reward in self._db.execute(
            "SELECT rollout_id, agent, reward FROM calls "
            f"WHERE rollout_id IN ({_places(rollout_ids)}) AND NOT replaced ORDER BY seq",
            tuple(rollout_ids),
        ):
            _asked(found, rollout_id).append((agent, reward))
        return found

    def scores(self, rollout_id: str) -> list[StoredScore]:
        """Return all that a rollout was ever given, second opinions too, oldest first."""
        return [score_of(*row) for row in self._db.execute(SCORES, (rollout_id,))]

    def _seen(self, where: str, values: Any) -> list[SeenRollout]:
        rows = self._db.execute(
            f"SELECT started, scores.seq IS NOT NULL, {COLUMNS} FROM {SCORED} WHERE {where}", values
        ).fetchall()
        found = [(started, bool(scored), rollout_of(*row)) for started, scored, *row in rows]
        made = {
            rollout_id: (calls, tokens)
            for rollout_id, calls, tokens in self._db.execute(
                "SELECT rollout_id, count(*), sum(length(sampled)) / 4 FROM calls "
                f"WHERE rollout_id IN ({_places(found)}) AND NOT replaced GROUP BY rollout_id",
                [rollout.rollout_id for _, _, rollout in found],
            )
        }
        return [
            SeenRollout(rollout, started, scored, *made.get(rollout.rollout_id, (0, 0)))
            for started, scored, rollout in found
        ]


def look(path: Path, question: Callable[[StoreView], Answer]) -> Answer:
    """Return the answer to ``question`` as of one moment.

    Raises StoreError for what is no run's store, one of another version, and one that cannot be read.
    """
    for _ in range(ATTEMPTS):
        before = _state(path)
        try:
            with _opened(path, alone=before.alone) as db:
                answer = question(StoreView(db))
        except BROKEN as error:
            if before.alone and _state(path) != before:
                continue
            raise unreadable(path, error) from error
        # A file that nobody else has open is read without locks; did somebody open it meanwhile, it is read again.
        if not before.alone or _state(path) == before:
            return answer
    raise StoreError(f"{path} was opened and closed by others all the time while it was read; try again")


@dataclass(frozen=True)
class _State:
    alone: bool
    """Nobody has the file open: SQLite keeps a log beside it while somebody has."""
    size: int
    changed: int


def _state(path: Path) -> _State:
    try:
        found = path.stat()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}; give a run folder") from error
    return _State(not path.with_name(path.name + "-wal").exists(), found.st_size, found.st_mtime_ns)


@contextmanager
def _opened(path: Path, *, alone: bool) -> Iterator[sqlite3.Connection]:
    # Without "immutable", SQLite would leave files of its own beside one that nobody has open.
    uri = f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if alone else ''}"
    with closing(sqlite3.connect(uri, uri=True, timeout=30.0, isolation_level=None)) as db:
        db.row_factory = typed_row
        check_version(db, path)
        db.execute("BEGIN")
        yield db


def _asked(found: Mapping[Any, Answer], name: Any) -> Answer:
    """Return what was asked for under ``name``; ValueError where the file gives a row that nobody asked for."""
    if name not in found:
        raise ValueError(f"a row of {name!r:.100} stands where another should")
    return found[name]


def _places(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))
