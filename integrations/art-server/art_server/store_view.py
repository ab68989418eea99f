"""Reads a run's store, even while others write to it. The file is opened read-only, so nothing is changed.

``read_snapshot`` opens the file, reads a consistent snapshot, and closes it. Long lists are read in pages.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from art_core.errors import StoreError
from art_core.store.calls import CallReader
from art_core.store.rollouts import COLUMNS, SCORED, SCORES, StoredRollout, StoredScore, rollout_of, score_of
from art_core.store.schema import BROKEN, check_version, typed_row, unreadable
from art_core.store.values import from_json, object_from_json
from art_core.types import Call

Result = TypeVar("Result")

LOST = ("RolloutLost", "CancelledError")
"""Prefixes of the errors of lost attempts, which were repeated and aren't the agent's failures."""
AGENT_CALLS = 200
"""Calls that are looked through for agents' names."""
ATTEMPTS = 5
"""Attempts to read a file that nobody else had open at first and that another process started to write meanwhile."""
GROUP = "coalesce(grp, rollouts.rollout_id)"
"""The name of a rollout's group; a rollout without a group is a group by itself."""
FILTER = f"""
(:split IS NULL OR split = :split) AND (:step IS NULL OR step = :step) AND (:task_id IS NULL OR task_id = :task_id)
AND (:group IS NULL OR {GROUP} = :group)
"""
RESULT = """
(:outcome IS NULL OR :outcome = outcome(finished, error, reward, metrics))
AND (:at_least IS NULL OR reward >= :at_least) AND (:at_most IS NULL OR reward <= :at_most)
AND (:agent IS NULL OR EXISTS (SELECT 1 FROM calls WHERE calls.rollout_id = rollouts.rollout_id AND agent = :agent))
AND (:found IS NULL OR rollouts.seq IN (SELECT value FROM json_each(:found)))
"""
"""The rest of the filter, which needs scores and calls."""
Outcome = Literal["success", "failure", "error", "unscored"]
Order = Literal["newest", "oldest", "lowest", "highest", "changed"]
ORDERS: dict[Order, str] = {
    "newest": "rollouts.seq DESC",
    "oldest": "rollouts.seq",
    "lowest": "reward IS NULL, reward, rollouts.seq DESC",
    "highest": "reward IS NULL, reward DESC, rollouts.seq DESC",
    "changed": "abs(change_of(rollouts.rollout_id)) DESC, change_of(rollouts.rollout_id), rollouts.seq DESC",
}


@dataclass(frozen=True)
class RolloutFilter:
    """Selects rollouts by these fields; None matches all."""

    split: str | None = None
    step: int | None = None
    task_id: str | None = None
    group: str | None = None
    outcome: Outcome | None = None
    at_least: float | None = None
    """Lowest reward."""
    at_most: float | None = None
    """Highest reward."""
    agent: str | None = None
    """Of one of its calls."""
    found: tuple[int, ...] | None = None
    """Numbers (``seq``) of rollouts, of which the others are left out."""

    @property
    def values(self) -> dict[str, Any]:
        """The parameters of ``FILTER`` and ``RESULT``."""
        return {**vars(self), "found": None if self.found is None else json.dumps(self.found)}

    @property
    def needs_results(self) -> bool:
        """Whether ``RESULT`` says something."""
        return any(getattr(self, name) is not None for name in ("outcome", "at_least", "at_most", "agent", "found"))


@dataclass(frozen=True)
class RolloutRow:
    """A stored rollout with totals of its calls."""

    stored: StoredRollout
    started: float
    """Unix time."""
    scored: bool
    """Whether it has a score, even one without a reward."""
    calls: int
    """Number of calls, without those that a retry replaced."""
    sampled_tokens: int


@dataclass(frozen=True)
class TaskRow:
    """A task with counts of its rollouts."""

    task_id: str
    task: Any
    rollouts: int
    first_step: int | None
    last_step: int | None


@dataclass(frozen=True)
class SplitRow:
    """A split with counts of its rollouts."""

    split: str | None
    rollouts: int
    last_step: int | None


class StoreView:
    """The queries on a store. Created by ``read_snapshot``."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def meta(self, key: str, default: Any = None) -> Any:
        """Return the value that ``Store.set_meta`` stored under ``key``."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return default if row is None else from_json(row[0])

    def step_counts(self) -> tuple[int, int | None]:
        """Return the number of steps and the last step, which is None without steps."""
        return self._db.execute("SELECT count(DISTINCT step), max(step) FROM steps").fetchone()

    def steps(self, *, after: int, limit: int) -> list[tuple[int, float, dict[str, float]]]:
        """Return (step, Unix time, metrics) of up to ``limit`` steps after step ``after``, in order.

        For a repeated step, the last time counts.
        """
        rows = self._db.execute(
            "SELECT step, at, metrics FROM steps WHERE seq IN "
            "(SELECT max(seq) FROM steps WHERE step > ? GROUP BY step ORDER BY step LIMIT ?) ORDER BY step",
            (after, limit),
        )
        return [(step, at, object_from_json(metrics)) for step, at, metrics in rows]

    def splits(self) -> list[SplitRow]:
        """Return all splits."""
        rows = self._db.execute("SELECT split, count(*), max(step) FROM rollouts GROUP BY split ORDER BY split")
        return [SplitRow(*row) for row in rows]

    def progress(self, step: int, split: str) -> tuple[int, int]:
        """Return the numbers of started and finished rollouts of a step."""
        return self._db.execute(
            "SELECT count(*), count(finished) FROM rollouts WHERE step = ? AND split = ?", (step, split)
        ).fetchone()

    def rollouts(
        self, selected: RolloutFilter, *, limit: int, offset: int, order: Order = "newest",
        changes: Mapping[str, float] | None = None,
    ) -> tuple[int, list[RolloutRow]]:  # fmt: skip
        """Return the number of selected rollouts, and a page of them. ``changes``, by rollout, are for the order ``changed``."""
        if order == "changed":
            changes = changes or {}
            self._db.create_function("change_of", 1, lambda rollout_id: changes.get(rollout_id, 0.0))
        values = {**selected.values, "limit": limit, "offset": offset}
        scored = selected.needs_results or order in ("lowest", "highest")
        chosen = f"FROM {SCORED} WHERE {FILTER} AND {RESULT}" if scored else f"FROM rollouts WHERE {FILTER}"
        [total] = self._db.execute(f"SELECT count(*) {chosen}", values).fetchone()
        by = ORDERS[order]
        page = f"SELECT rollouts.seq {chosen} ORDER BY {by} LIMIT :limit OFFSET :offset"
        return total, self._rollout_rows(f"rollouts.seq IN ({page}) ORDER BY {by}", values)

    def agents(self) -> list[str]:
        """Return the names of the agents that made calls, of the first ``AGENT_CALLS`` calls."""
        rows = self._db.execute(
            f"SELECT DISTINCT agent FROM (SELECT agent FROM calls ORDER BY seq LIMIT {AGENT_CALLS}) WHERE agent IS NOT NULL"
        )
        return sorted(agent for (agent,) in rows)

    def groups(self, selected: RolloutFilter, *, limit: int, offset: int) -> tuple[int, list[list[RolloutRow]]]:
        """Return the number of selected groups, and a page of them, newest first; each group's rollouts are oldest first."""
        values = {**selected.values, "limit": limit, "offset": offset}
        [total] = self._db.execute(f"SELECT count(DISTINCT {GROUP}) FROM rollouts WHERE {FILTER}", values).fetchone()
        page = self._db.execute(
            f"SELECT {GROUP} AS name, min(seq), max(seq) FROM rollouts WHERE {FILTER} GROUP BY name "
            "ORDER BY min(seq) DESC LIMIT :limit OFFSET :offset",
            values,
        ).fetchall()
        groups: dict[str, list[RolloutRow]] = {name: [] for name, _, _ in page}
        if page:
            # No index has groups, but the rows of a page are close together.
            first, last = min(low for _, low, _ in page), max(high for _, _, high in page)
            for rollout in self._rollout_rows(
                f"rollouts.seq BETWEEN ? AND ? AND {GROUP} IN ({_placeholders(page)}) ORDER BY rollouts.seq",
                (first, last, *groups),
            ):
                _get(groups, rollout.stored.group or rollout.stored.rollout_id).append(rollout)
        return total, list(groups.values())

    def tasks(self, *, split: str | None, limit: int, offset: int) -> tuple[int, list[TaskRow]]:
        """Return the number of tasks, and a page of them, those with rollouts in the most steps first."""
        values = {"split": split, "limit": limit, "offset": offset}
        condition = "task_id IS NOT NULL AND (:split IS NULL OR split = :split)"
        [total] = self._db.execute(f"SELECT count(DISTINCT task_id) FROM rollouts WHERE {condition}", values).fetchone()
        rows = self._db.execute(
            f"SELECT task_id, min(seq), count(*), min(step), max(step) FROM rollouts WHERE {condition} GROUP BY task_id "
            "ORDER BY count(DISTINCT step) DESC, min(seq) LIMIT :limit OFFSET :offset",
            values,
        ).fetchall()
        tasks = dict(
            self._db.execute(
                f"SELECT seq, task FROM rollouts WHERE seq IN ({_placeholders(rows)})", [row[1] for row in rows]
            )
        )
        return total, [TaskRow(task_id, from_json(_get(tasks, seq)), *rest) for task_id, seq, *rest in rows]

    def rollout(self, rollout_id: str) -> RolloutRow | None:
        """Return a rollout; None if it doesn't exist."""
        return next(iter(self._rollout_rows("rollouts.rollout_id = ?", (rollout_id,))), None)

    def rollouts_by_id(self, rollout_ids: Sequence[str]) -> dict[str, RolloutRow]:
        """Return the rollouts that exist, by id."""
        rows = self._rollout_rows("rollouts.rollout_id IN (SELECT value FROM json_each(?))", (json.dumps(rollout_ids),))
        return {row.stored.rollout_id: row for row in rows}

    def cut_off(self, rollout_ids: Sequence[str]) -> set[str]:
        """Return those of the rollouts in which a call ended at its token limit."""
        rows = self._db.execute(
            "SELECT DISTINCT rollout_id FROM calls WHERE finish_reason = 'length' AND NOT replaced "
            "AND rollout_id IN (SELECT value FROM json_each(?))",
            (json.dumps(rollout_ids),),
        )
        return {rollout_id for (rollout_id,) in rows}

    def rows(self, query: str, values: Sequence[object] | Mapping[str, object] = ()) -> list[tuple]:
        """Return the rows of a query, as ``Store.rows`` does."""
        return self._db.execute(query, values).fetchall()

    def calls(self, rollout_id: str) -> tuple[Call, ...]:
        """Return a rollout's calls as ``Store.calls`` does."""
        return CallReader(self._db, rollout_id).calls()

    def call_rewards(self, rollout_ids: Sequence[str]) -> dict[str, list[tuple[str | None, float | None]]]:
        """Return (agent, reward) of every call, by rollout, in the order of ``calls``."""
        rewards: dict[str, list[tuple[str | None, float | None]]] = {rollout_id: [] for rollout_id in rollout_ids}
        for rollout_id, agent, reward in self._db.execute(
            "SELECT rollout_id, agent, reward FROM calls "
            f"WHERE rollout_id IN ({_placeholders(rollout_ids)}) AND NOT replaced ORDER BY seq",
            tuple(rollout_ids),
        ):
            _get(rewards, rollout_id).append((agent, reward))
        return rewards

    def scores(self, rollout_id: str) -> list[StoredScore]:
        """Return all scores of a rollout, including second opinions, oldest first."""
        return [score_of(*row) for row in self._db.execute(SCORES, (rollout_id,))]

    def _rollout_rows(self, where: str, values: Any) -> list[RolloutRow]:
        rows = self._db.execute(
            f"SELECT started, scores.seq IS NOT NULL, {COLUMNS} FROM {SCORED} WHERE {where}", values
        ).fetchall()
        rollouts = [(started, bool(scored), rollout_of(*row)) for started, scored, *row in rows]
        totals = {
            rollout_id: (calls, tokens)
            for rollout_id, calls, tokens in self._db.execute(
                "SELECT rollout_id, count(*), sum(length(sampled)) / 4 FROM calls "
                f"WHERE rollout_id IN ({_placeholders(rollouts)}) AND NOT replaced GROUP BY rollout_id",
                [rollout.rollout_id for _, _, rollout in rollouts],
            )
        }
        return [
            RolloutRow(rollout, started, scored, *totals.get(rollout.rollout_id, (0, 0)))
            for started, scored, rollout in rollouts
        ]


def read_snapshot(path: Path, read: Callable[[StoreView], Result]) -> Result:
    """Return the result of ``read`` on a consistent snapshot.

    Raises StoreError if the file isn't a run's store, has another version, or can't be read.
    """
    for _ in range(ATTEMPTS):
        before = _state(path)
        try:
            with _opened(path, unused=before.unused) as db:
                result = read(StoreView(db))
        except BROKEN as error:
            if before.unused and _state(path) != before:
                continue
            raise unreadable(path, error) from error
        # A file that no other process has open is read without locks; if one has opened it meanwhile, it is read again.
        if not before.unused or _state(path) == before:
            return result
    raise StoreError(f"other processes kept opening and closing {path} while it was being read; try again")


@dataclass(frozen=True)
class _State:
    unused: bool
    """Whether no process has the file open; SQLite keeps a log beside an open file."""
    size: int
    changed: int


def _state(path: Path) -> _State:
    try:
        stat = path.stat()
    except OSError as error:
        raise StoreError(f"can't read {path}: {error}; pass a run folder") from error
    return _State(not path.with_name(path.name + "-wal").exists(), stat.st_size, stat.st_mtime_ns)


@contextmanager
def _opened(path: Path, *, unused: bool) -> Iterator[sqlite3.Connection]:
    # Without "immutable", SQLite would create files beside a store that no process has open.
    uri = f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if unused else ''}"
    with closing(sqlite3.connect(uri, uri=True, timeout=30.0, isolation_level=None)) as db:
        db.row_factory = typed_row
        check_version(db, path)
        db.create_function("outcome", 4, _outcome, deterministic=True)
        db.execute("BEGIN")
        yield db


def _outcome(finished: float | None, error: str | None, reward: float | None, metrics: bytes | None) -> Outcome | None:
    """Return how a rollout ended, None for one that hasn't: by ``metrics["success"]``, or by its reward without that metric."""
    if error or not finished:
        return "error" if error and not error.startswith(LOST) else None
    if reward is None:
        return "unscored"
    return "success" if object_from_json(metrics).get("success", reward) >= 1 else "failure"


def _get(entries: Mapping[Any, Result], key: Any) -> Result:
    """Return ``entries[key]``; ValueError for a key that wasn't queried, which a damaged file may contain."""
    if key not in entries:
        raise ValueError(f"unexpected row of {key!r:.100}")
    return entries[key]


def _placeholders(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))
