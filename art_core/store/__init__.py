"""One SQLite file per run: rollouts, calls, scores, steps. What is written stays; nothing is ever changed for the worse.

Each process opens a Store of its own on the same file, and may read while another writes. Knows nothing about how a run
goes.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from art_core.errors import StoreError
from art_core.store.calls import CallReader, CallWriter, RecordedCall, reward_calls
from art_core.store.digest import call_digest
from art_core.store.rollouts import (
    ATTEMPTS,
    ROLLOUTS,
    SCORES,
    SHAPES,
    Attempt,
    Shape,
    StoredRollout,
    StoredScore,
    attempt_of,
    rollout_of,
    score_of,
    trajectory_of,
)  # fmt: skip
from art_core.store.run_folder import bring_to_disk
from art_core.store.schema import BROKEN, connect, unreadable
from art_core.store.updates import UPDATE, Update, update_of
from art_core.store.values import (
    column,
    from_json,
    is_json,
    object_from_json,
    text_to_column,
    to_json,
)  # fmt: skip
from art_core.store.writer import Writer
from art_core.types import Call, Trajectory

__all__ = [
    "Attempt", "RecordedCall", "Shape", "Store", "StoredRollout", "StoredScore", "Update",
]  # fmt: skip


class Store:
    """``run.sqlite``. Also a ``Recorder``: ``record`` and every ``add_`` return at once, and a thread of its own writes.

    Reading sees all that this store was given before. Reading and ``flush`` raise StoreError where the file cannot be written
    or read; then nothing taken is lost, and what could not be written waits in memory for the next ``flush``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._reading = threading.Lock()
        self._db: sqlite3.Connection | None = connect(self.path)
        self._calls = CallWriter()
        self._writer = Writer(self.path, self._calls.forget)
        with self._read() as db:
            self._rollout_ids = {rollout_id for (rollout_id,) in db.execute("SELECT rollout_id FROM rollouts")}

    def record(self, rollout_id: str, call: Call) -> None:
        """Take a call. Never waits for the disk; raises StoreError only after ``close``."""
        self._writer.put(lambda db: self._calls.write(db, rollout_id, call))

    def add_rollout(
        self,
        rollout_id: str,
        *,
        task: Any,
        step: int | None = None,
        split: str | None = None,
        task_id: str | None = None,
        group: str | None = None,
        continues: str | None = None,
    ) -> None:
        """Note that a run of the agent begins. Raises StoreError where one with this id has begun before.

        ``continues`` is the rollout of a process that ended whose answers it begins with.
        """
        if rollout_id in self._rollout_ids:
            raise StoreError(f"{self.path} has a rollout {rollout_id!r} already; give every run of an agent its own id")
        self._rollout_ids.add(rollout_id)
        values = (rollout_id, step, split, task_id, to_json(task), group, time.time(), continues)
        self._write(
            "INSERT INTO rollouts (rollout_id, step, split, task_id, task, grp, started, continues) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            values,
        )

    def has_rollout(self, rollout_id: str) -> bool:
        """Whether ``add_rollout`` was told of it, by this store or by what is in the file."""
        return rollout_id in self._rollout_ids

    def finish_rollout(
        self, rollout_id: str, *, output: Any = None, error: str | None = None, seconds: float = 0.0
    ) -> None:
        """Note how it ended. An output that JSON cannot say is kept as its fields, else as its repr."""
        self._write(
            "UPDATE rollouts SET finished = ?, output = ?, exact = ?, error = ?, seconds = ? WHERE rollout_id = ?",
            (time.time(), to_json(output), is_json(output), text_to_column(error), seconds, rollout_id),
        )

    def touch_rollout(self, rollout_id: str) -> None:
        """Note that it ended now, for whoever cannot know whether another call comes; what is known of its end stays."""
        now = time.time()
        self._write(
            "UPDATE rollouts SET finished = ?, seconds = ? - started WHERE rollout_id = ?", (now, now, rollout_id)
        )

    def add_scores(
        self,
        rollout_ids: Sequence[str],
        rewards: Sequence[float | None],
        *,
        metrics: Sequence[Mapping[str, float]] | None = None,
        notes: Sequence[Mapping[str, str]] | None = None,
        advantages: Sequence[float] | None = None,
        by: str | None = None,
        call_rewards: Sequence[Sequence[float | None]] = (),
        aside: bool = False,
    ) -> None:
        """Add one score per rollout, in the same order, all or none. Older scores stay; the newest that is not ``aside`` counts.

        ``call_rewards``, where there are any: per rollout one per call as ``calls`` returns them; None leaves a call's as it is.
        ``aside`` is for second opinions, which only ``scores`` shows; they reward no calls (ValueError).
        """
        if aside and call_rewards:
            raise ValueError("a score set aside changes no rollout, so it cannot reward calls: give no call_rewards")
        now, count = time.time(), len(rollout_ids)
        rows = [
            (
                rollout_id,
                _number(reward),
                to_json(dict(measured)),
                to_json(dict(said)),
                _number(advantage),
                by,
                now,
                aside,
            )
            for rollout_id, reward, measured, said, advantage in zip(
                rollout_ids,
                rewards,
                metrics if metrics is not None else [{}] * count,
                notes if notes is not None else [{}] * count,
                advantages or [None] * count,
                strict=True,
            )
        ]
        given = list(zip(rollout_ids, call_rewards, strict=True)) if call_rewards else []

        def write(db: sqlite3.Connection) -> None:
            db.executemany(_ADD_SCORE, rows)
            for rollout_id, of_calls in given:
                reward_calls(db, rollout_id, of_calls)

        self._writer.put(write)

    def add_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note what a training step measured."""
        self._write(
            "INSERT INTO steps (step, metrics, at) VALUES (?, ?, ?)", (step, to_json(dict(metrics)), time.time())
        )

    def add_update(
        self, step: int, version: int, trajectories: Sequence[Trajectory], *, targets: float | None = None
    ) -> None:
        """Note what an optimizer step was given and which weights it made."""
        trained = [
            (t.rollout_id if t.rollout_id in self._rollout_ids else None, b"".join(map(call_digest, t.calls)).hex())
            for t in trajectories
        ]
        self._write(
            "INSERT INTO updates (step, version, targets, trained) VALUES (?, ?, ?, ?)",
            (step, version, targets, to_json(trained)),
        )

    def updates(self) -> Iterator[Update]:
        """Yield what optimizer steps were given, in the order in which they were taken."""
        with self._read() as db:
            numbers = [seq for (seq,) in db.execute("SELECT seq FROM updates ORDER BY seq")]
        for number in numbers:
            with self._read() as db:
                update = update_of(db.execute(UPDATE, (number,)).fetchone())
            yield update

    def add_opening(self, version: int) -> None:
        """Note that the run goes on, with the weights of this version: later ones made before are not those of its future."""
        self._write("INSERT INTO openings (version, at) VALUES (?, ?)", (version, time.time()))

    def openings(self) -> tuple[tuple[float, int], ...]:
        """Return (Unix time, version) of every opening, in order."""
        with self._read() as db:
            return tuple(db.execute("SELECT at, version FROM openings ORDER BY seq"))

    def set_meta(self, key: str, value: Any) -> None:
        """Keep a JSON value under a key, over what stood there."""
        self._write("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (key, to_json(value)))

    def meta(self, key: str, default: Any = None) -> Any:
        """Return what ``set_meta`` kept under a key."""
        with self._read() as db:
            row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
            return default if row is None else from_json(row[0])

    def calls(self, rollout_id: str) -> tuple[Call, ...]:
        """Return a rollout's calls in the order in which they were answered, without those that a retry replaced."""
        with self._read() as db:
            return CallReader(db, rollout_id).calls()

    def calls_of(self, rollout_id: str, request_ids: Collection[str]) -> tuple[Call, ...]:
        """Return those of a rollout's calls that these requests made, as ``calls`` does: for a rollout that has many."""
        with self._read() as db:
            return CallReader(db, rollout_id, request_ids).calls()

    def recorded(self, rollout_id: str) -> tuple[RecordedCall, ...]:
        """Return a rollout's calls, those that a retry replaced too, without requests and answers, for checking."""
        with self._read() as db:
            return CallReader(db, rollout_id).recorded()

    def callers(self) -> tuple[tuple[str, float | None, int], ...]:
        """Return (rollout, when it was begun, number of calls) of all that made calls; None for one never begun."""
        with self._read() as db:
            return tuple(
                db.execute(
                    "SELECT calls.rollout_id, started, count(*) FROM calls LEFT JOIN rollouts USING (rollout_id) "
                    "GROUP BY calls.rollout_id ORDER BY min(calls.seq)"
                )
            )

    def started(self, rollout_ids: Collection[str]) -> dict[str, float]:
        """Return the Unix time at which each of these rollouts began; unknown ones are left out."""
        with self._read() as db:
            return dict(
                db.execute(
                    "SELECT rollout_id, started FROM rollouts WHERE rollout_id IN (SELECT value FROM json_each(?))",
                    (to_json(list(rollout_ids)).decode(),),
                )
            )

    def gaps(self, table: Literal["calls", "updates"]) -> tuple[tuple[int, int], ...]:
        """Return (first, last) of the runs of rows that were in the table once and are not any more."""
        with self._read() as db:
            [highest] = db.execute("SELECT max(seq) FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
            found, before = [], 0
            for (seq,) in db.execute(f"SELECT seq FROM {table} ORDER BY seq"):
                if seq > before + 1:
                    found.append((before + 1, seq - 1))
                before = seq
        return (*found, (before + 1, highest)) if (highest or 0) > before else tuple(found)

    def rollouts(
        self, *, split: str | None = None, step: int | None = None, group: str | None = None
    ) -> tuple[StoredRollout, ...]:
        """Return the rollouts in the order in which they began, finished or not; None takes every split, step or group."""
        wanted = {
            name: value for name, value in (("split", split), ("step", step), ("grp", group)) if value is not None
        }
        where = " AND ".join(f"{name} = :{name}" for name in wanted) or "TRUE"
        with self._read() as db:
            rows = db.execute(f"{ROLLOUTS} WHERE {where} ORDER BY rollouts.seq", wanted)
            return tuple(map(rollout_of, rows))

    def attempts(self, group: str) -> tuple[Attempt, ...]:
        """Return the rollouts of a group in the order in which they began, with what says whether they can be used again."""
        with self._read() as db:
            return tuple(map(attempt_of, db.execute(ATTEMPTS, (group,))))

    def shapes(self, step: int, split: str = "train") -> list[Shape]:
        """Return what the scored rollouts of a step look like, in the order in which they began."""
        with self._read() as db:
            return [Shape(*row) for row in db.execute(SHAPES, (step, split))]

    def trajectory(self, rollout_id: str) -> Trajectory:
        """Return a rollout with its calls and newest scores. Raises StoreError where it was never added."""
        with self._read() as db:
            row = db.execute(f"{ROLLOUTS} WHERE rollouts.rollout_id = ?", (rollout_id,)).fetchone()
            if row is None:
                raise StoreError(f"{self.path} has no rollout {rollout_id!r}; rollouts() lists those it has")
            return trajectory_of(rollout_of(row), CallReader(db, rollout_id).calls())

    def trajectories(self, *, split: str | None = None, step: int | None = None) -> tuple[Trajectory, ...]:
        """Return the finished rollouts with their calls and newest scores, in the order in which they began."""
        found = [rollout for rollout in self.rollouts(split=split, step=step) if rollout.finished]
        return tuple(trajectory_of(rollout, self.calls(rollout.rollout_id)) for rollout in found)

    def scores(self, rollout_id: str) -> tuple[StoredScore, ...]:
        """Return all that a rollout was ever given, second opinions too, oldest first."""
        with self._read() as db:
            return tuple(score_of(row) for row in db.execute(SCORES, (rollout_id,)))

    def steps(self) -> tuple[tuple[int, dict[str, float]], ...]:
        """Return (step, metrics) in the order in which they were added."""
        with self._read() as db:
            return tuple(
                (column(step, int), object_from_json(metrics))
                for step, metrics in db.execute("SELECT step, metrics FROM steps ORDER BY seq")
            )

    def history(self, until: int) -> list[tuple[int, dict[str, float]]]:
        """Return (step, metrics) up to the step ``until``; of a step that was done again after an interruption, the last."""
        newest = dict(self.steps())
        return [(step, newest[step]) for step in sorted(newest) if step <= until]

    def is_behind(self, most: int) -> bool:
        """Whether more than ``most`` writes wait for the disk, or an attempt failed: ``flush`` before taking on more."""
        return self._writer.failed or self._writer.backlog > most

    def saved(self) -> Future[None]:
        """Return what comes true when everything taken would survive this process; StoreError in it where it cannot."""
        return self._writer.saved()

    def flush(self) -> None:
        """Return when that has come true; raises StoreError if it cannot, and once for what never can be written."""
        self._writer.flush()

    def sync(self) -> None:
        """Return when everything taken would survive a loss of power too. Raises StoreError where it cannot."""
        self.flush()
        try:
            # Not by a checkpoint of SQLite's, which leaves out what a reader elsewhere may still need, and the sync with it. The
            # log only: opening and closing the database itself would drop the locks that SQLite has on it.
            with suppress(FileNotFoundError):  # where there can be no log, every commit is synced
                bring_to_disk(self.path.with_name(f"{self.path.name}-wal"))
            bring_to_disk(self.path.parent)
        except OSError as error:
            raise StoreError(f"{self.path} could not be brought to the disk: {error}; check the disk") from error

    def close(self) -> None:
        """Flush and close the file. Closing twice is harmless. Raises StoreError where the flush fails."""
        self._writer.close()
        with self._reading:
            if self._db is not None:
                self._db.close()
                self._db = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        self._writer.put(lambda db: db.execute(statement, values))

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        self._writer.flush()
        with self._reading:
            if self._db is None:
                raise StoreError(f"{self.path} was closed; open the store again to read")
            try:
                # One transaction, so that all of a rollout is read as of one moment.
                self._db.execute("BEGIN")
                yield self._db
            except BROKEN as error:
                raise unreadable(self.path, error) from error
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")


_ADD_SCORE = """
INSERT INTO scores (rollout_id, reward, metrics, notes, advantage, scored_by, at, aside) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""


def _number(value: float | None) -> float | None:
    """Return a plain float: SQLite does not know numpy's."""
    return None if value is None else float(value)
