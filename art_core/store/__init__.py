"""One SQLite file per run: rollouts, calls, scores, steps. Rows are added, never removed.

Each process opens its own Store on the same file, and may read while another writes.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from art_core.errors import StoreError
from art_core.store.calls import CallReader, CallWriter, RecordedCall, insert, reward_calls
from art_core.store.digest import call_digest
from art_core.store.rollouts import (
    ATTEMPTS,
    ROLLOUTS,
    SCORES,
    UPDATE,
    Attempt,
    StoredRollout,
    StoredScore,
    Update,
    rollout_of,
    score_of,
    trajectory_of,
    update_of,
)  # fmt: skip
from art_core.store.run_folder import bring_to_disk
from art_core.store.schema import BROKEN, connect, typed_row, unreadable
from art_core.store.values import from_json, is_json, object_from_json, text_to_column, to_json
from art_core.store.writer import Writer
from art_core.types import Call, Trajectory

__all__ = ["Attempt", "RecordedCall", "Store", "StoredRollout", "StoredScore", "Update"]

Row = TypeVar("Row")


class Store:
    """``run.sqlite``. Also a ``Recorder``: ``record`` and every ``add_`` return at once, and a thread writes.

    A read sees everything that this store accepted before. Reads and ``flush`` raise StoreError if the file cannot be written or
    read; nothing accepted is lost then, but waits in memory for the next ``flush``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._reading = threading.Lock()
        self._db: sqlite3.Connection | None = connect(self.path)
        self._db.row_factory = typed_row
        self._calls = CallWriter()
        self._writer = Writer(self.path, self._calls.forget)
        self._rollout_ids = {rollout_id for (rollout_id,) in self.rows("SELECT rollout_id FROM rollouts")}

    def record(self, rollout_id: str, call: Call) -> None:
        """Accept a call. Never waits for the disk; raises StoreError only after ``close``."""
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
        """Note that a rollout begins. Raises StoreError if its id was used before.

        ``continues`` is an interrupted rollout whose answers it replays.
        """
        if rollout_id in self._rollout_ids:
            raise StoreError(
                f"{self.path} already has a rollout {rollout_id!r}; pass an id of its own for every rollout"
            )
        self._rollout_ids.add(rollout_id)
        self._insert(
            "rollouts",
            rollout_id=rollout_id,
            step=step,
            split=split,
            task_id=task_id,
            task=to_json(task),
            grp=group,
            started=time.time(),
            continues=continues,
        )

    def has_rollout(self, rollout_id: str) -> bool:
        """Return whether the rollout was added by this store, or was in the file when it was opened."""
        return rollout_id in self._rollout_ids

    def finish_rollout(
        self, rollout_id: str, *, output: Any = None, error: str | None = None, seconds: float = 0.0
    ) -> None:
        """Note how a rollout ended. An output without a JSON form is stored as its fields, else as its repr."""
        self._write(
            "UPDATE rollouts SET finished = ?, output = ?, exact = ?, error = ?, seconds = ? WHERE rollout_id = ?",
            (time.time(), to_json(output), is_json(output), text_to_column(error), seconds, rollout_id),
        )

    def touch_rollout(self, rollout_id: str) -> None:
        """Mark a rollout that may still make another call as finished now; output and error stay."""
        self._write(
            "UPDATE rollouts SET finished = :now, seconds = :now - started WHERE rollout_id = :rollout_id",
            {"now": time.time(), "rollout_id": rollout_id},
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
        calls: Sequence[Sequence[Call]] = (),
        aside: bool = False,
    ) -> None:
        """Add one score per rollout, in the same order, all or none. Older scores stay; the newest that is not ``aside`` counts.

        ``calls``: per rollout the calls whose ``reward`` is stored, None too.
        ``aside`` marks second opinions, which only ``scores`` shows; they reward no calls (ValueError).
        """
        if aside and calls:
            raise ValueError("a score set aside changes no rollout, so it cannot reward calls: pass no calls")
        now, empty = time.time(), [{}] * len(rollout_ids)
        columns = (rollout_ids, rewards, metrics or empty, notes or empty, advantages or [None] * len(rollout_ids))
        scores = [
            {
                "rollout_id": rollout_id,
                "reward": _number(reward),
                "metrics": to_json(dict(metric_values)),
                "notes": to_json(dict(texts)),
                "advantage": _number(advantage),
                "scored_by": by,
                "at": now,
                "aside": aside,
            }
            for rollout_id, reward, metric_values, texts, advantage in zip(*columns, strict=True)
        ]
        rewarded = list(zip(rollout_ids, calls, strict=True)) if calls else []

        def write(db: sqlite3.Connection) -> None:
            for score in scores:
                insert(db, "scores", score)
            for rollout_id, of_calls in rewarded:
                reward_calls(db, rollout_id, of_calls)

        self._writer.put(write)

    def add_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note the metrics of a training step."""
        self._insert("steps", step=step, metrics=to_json(dict(metrics)), at=time.time())

    def add_update(
        self, step: int, version: int, trajectories: Sequence[Trajectory], *, targets: float | None = None
    ) -> None:
        """Note the input of an optimizer step, and the version of the weights that it made."""
        trained = [
            (t.rollout_id if t.rollout_id in self._rollout_ids else None, b"".join(map(call_digest, t.calls)).hex())
            for t in trajectories
        ]
        self._insert("updates", step=step, version=version, targets=targets, trained=to_json(trained))

    def updates(self) -> Iterator[Update]:
        """Yield the inputs of optimizer steps, in order."""
        for seq in self.rows("SELECT seq FROM updates ORDER BY seq"):
            with self._read() as db:
                update = update_of(*db.execute(UPDATE, seq).fetchone())
            yield update

    def add_opening(self, version: int) -> None:
        """Note that the run resumes with the weights of this version: later ones made before are abandoned."""
        self._insert("openings", version=version, at=time.time())

    def openings(self) -> tuple[tuple[float, int], ...]:
        """Return (Unix time, version) of every opening, in order."""
        return tuple(self.rows("SELECT at, version FROM openings ORDER BY seq"))

    def set_meta(self, key: str, value: Any) -> None:
        """Store a JSON value under a key, replacing an earlier one."""
        self._write("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", (key, to_json(value)))

    def meta(self, key: str, default: Any = None) -> Any:
        """Return what ``set_meta`` stored under a key."""
        values = self._all(from_json, "SELECT value FROM meta WHERE key = ?", (key,))
        return values[0] if values else default

    def calls(self, rollout_id: str) -> tuple[Call, ...]:
        """Return a rollout's calls in the order of their answers, without those replaced by a retry."""
        with self._read() as db:
            return CallReader(db, rollout_id).calls()

    def calls_of(self, rollout_id: str, request_ids: Collection[str]) -> tuple[Call, ...]:
        """Return what ``calls`` does, but only the calls that these requests made: for a rollout that has many."""
        with self._read() as db:
            return CallReader(db, rollout_id, request_ids).calls()

    def recorded(self, rollout_id: str) -> tuple[RecordedCall, ...]:
        """Return a rollout's calls, also those replaced by a retry, without requests and answers: for audits."""
        with self._read() as db:
            return CallReader(db, rollout_id).recorded()

    def callers(self) -> tuple[tuple[str, float | None, int], ...]:
        """Return (rollout, Unix time of its begin, number of calls) of all that made calls; None for one never added."""
        return tuple(
            self.rows(
                "SELECT calls.rollout_id, started, count(*) FROM calls LEFT JOIN rollouts USING (rollout_id) "
                "GROUP BY calls.rollout_id ORDER BY min(calls.seq)"
            )
        )

    def started(self, rollout_ids: Collection[str]) -> dict[str, float]:
        """Return the Unix time at which each of these rollouts began, without unknown ones."""
        query = "SELECT rollout_id, started FROM rollouts WHERE rollout_id IN (SELECT value FROM json_each(?))"
        return dict(self.rows(query, (to_json(list(rollout_ids)).decode(),)))

    def rollouts(
        self, *, split: str | None = None, step: int | None = None, group: str | None = None
    ) -> tuple[StoredRollout, ...]:
        """Return the rollouts in the order in which they began, finished or not; None takes every split, step or group."""
        wanted = {"split": split, "step": step, "grp": group}
        where = " AND ".join(f"{name} = :{name}" for name, value in wanted.items() if value is not None) or "TRUE"
        return tuple(self._all(rollout_of, f"{ROLLOUTS} WHERE {where} ORDER BY rollouts.seq", wanted))

    def attempts(self, group: str) -> tuple[Attempt, ...]:
        """Return a group's rollouts in the order in which they began, with what decides whether they can be used again."""
        return tuple(self._all(Attempt, ATTEMPTS, (group,)))

    def trajectory(self, rollout_id: str) -> Trajectory:
        """Return a rollout with its calls and newest score. Raises StoreError if it was never added."""
        with self._read() as db:
            row = db.execute(f"{ROLLOUTS} WHERE rollouts.rollout_id = ?", (rollout_id,)).fetchone()
            if row is None:
                raise StoreError(f"{self.path} has no rollout {rollout_id!r}; rollouts() lists those it has")
            return trajectory_of(rollout_of(*row), CallReader(db, rollout_id).calls())

    def trajectories(self, *, split: str | None = None, step: int | None = None) -> tuple[Trajectory, ...]:
        """Return the finished rollouts with their calls and newest scores, in the order in which they began."""
        rollouts = [rollout for rollout in self.rollouts(split=split, step=step) if rollout.finished]
        return tuple(trajectory_of(rollout, self.calls(rollout.rollout_id)) for rollout in rollouts)

    def scores(self, rollout_id: str) -> tuple[StoredScore, ...]:
        """Return all scores of a rollout, second opinions too, oldest first."""
        return tuple(self._all(score_of, SCORES, (rollout_id,)))

    def steps(self) -> tuple[tuple[int, dict[str, float]], ...]:
        """Return (step, metrics) in the order in which they were added."""
        steps = "SELECT step, metrics FROM steps ORDER BY seq"
        return tuple(self._all(lambda step, metrics: (int(step), object_from_json(metrics)), steps))

    def history(self, until: int) -> list[tuple[int, dict[str, float]]]:
        """Return (step, metrics) up to the step ``until``; of a step that was repeated after an interruption, the last."""
        newest = dict(self.steps())
        return [(step, newest[step]) for step in sorted(newest) if step <= until]

    def rows(self, query: str, values: Sequence[object] | Mapping[str, object] = ()) -> list[tuple]:
        """Return the rows of a query of the tables in ``schema.py``. Raises StoreError for what the file should not hold."""
        return self._all(lambda *row: row, query, values)

    def is_behind(self, most: int) -> bool:
        """Return whether more than ``most`` writes wait for the disk, or one failed: ``flush`` before accepting more."""
        return self._writer.is_behind(most)

    def saved(self) -> Future[None]:
        """Return a future that resolves once everything accepted so far survives this process, or gets a StoreError."""
        return self._writer.saved()

    def flush(self) -> None:
        """Wait for ``saved``. Raises its StoreError, and one StoreError for records that can never be written."""
        self._writer.flush()

    def sync(self) -> None:
        """Wait until everything accepted survives a power loss too. Raises StoreError if it cannot."""
        self.flush()
        try:
            # Not by SQLite's checkpoint, which leaves out, unsynced, what a reader elsewhere may still need. Only the log:
            # opening and closing the database file would drop the locks that SQLite has on it.
            with suppress(FileNotFoundError):  # without a log every commit is synced
                bring_to_disk(self.path.with_name(f"{self.path.name}-wal"))
            bring_to_disk(self.path.parent)
        except OSError as error:
            raise StoreError(f"{self.path} could not be synced to the disk: {error}; check the disk") from error

    def close(self) -> None:
        """Flush and close the file. Closing twice is harmless. Raises StoreError if the flush fails."""
        self._writer.close()
        with self._reading:
            if self._db is not None:
                self._db.close()
                self._db = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _insert(self, table: str, **values: object) -> None:
        self._writer.put(lambda db: insert(db, table, values))

    def _write(self, statement: str, values: Sequence[object] | Mapping[str, object]) -> None:
        self._writer.put(lambda db: db.execute(statement, values))

    def _all(
        self, make: Callable[..., Row], query: str, values: Sequence[object] | Mapping[str, object] = ()
    ) -> list[Row]:
        with self._read() as db:
            return [make(*row) for row in db.execute(query, values)]

    @contextmanager
    def _read(self) -> Iterator[sqlite3.Connection]:
        """Hold one transaction, so that everything is read as of one moment. The only place that reports damage."""
        self._writer.flush()
        with self._reading:
            if self._db is None:
                raise StoreError(f"{self.path} was closed; open the store again to read")
            try:
                self._db.execute("BEGIN")
                yield self._db
            except BROKEN as error:
                raise unreadable(self.path, error) from error
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")


def _number(value: float | None) -> float | None:
    """Return a plain float: SQLite does not take numpy's."""
    return None if value is None else float(value)


def recorded_settings(model: str | Path) -> dict[str, Any]:
    """Return the ``model`` and the ``config`` that a run folder was started with; empty for a name or a model folder."""
    file = Path(model).expanduser() / "run.sqlite"
    if not file.is_file():
        return {}
    with Store(file) as store:
        return {"model": store.meta("model"), "config": store.meta("config", {})}
