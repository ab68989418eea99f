"""Scores in the run's file: explanations, second opinions that never count, and files of the version before."""

import asyncio
import sqlite3
import subprocess
import sys

import pytest

import art_audit
import art_core as art
from art_core.errors import StoreError
from art_core.store import Store, schema
from art_core.testing import ScriptedAgent
from art_core.types import Call

VERSION_3 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE blobs (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, json BLOB NOT NULL);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY, parent INTEGER NOT NULL, blob INTEGER NOT NULL, UNIQUE (parent, blob)
);
CREATE TABLE rollouts (
    seq INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL UNIQUE, step INTEGER, split TEXT, task_id TEXT, task BLOB, grp TEXT,
    started REAL NOT NULL, finished REAL, output BLOB, error TEXT, seconds REAL
);
CREATE INDEX rollouts_by_step ON rollouts (step, split);
CREATE TABLE calls (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, digest BLOB NOT NULL, rollout_id TEXT NOT NULL, replaced INTEGER NOT NULL DEFAULT 0,
    parent INTEGER, shared INTEGER NOT NULL, suffix BLOB NOT NULL, sampled BLOB NOT NULL, logprobs BLOB NOT NULL,
    forced BLOB NOT NULL, policy_version INTEGER NOT NULL, agent TEXT, thread TEXT, request_id TEXT NOT NULL,
    choice INTEGER NOT NULL, reward REAL, temperature REAL NOT NULL, finish_reason TEXT NOT NULL,
    messages INTEGER NOT NULL, tools INTEGER, settings INTEGER NOT NULL, response INTEGER NOT NULL
);
CREATE INDEX calls_by_rollout ON calls (rollout_id, seq);
CREATE INDEX calls_by_request ON calls (rollout_id, request_id);
CREATE TABLE scores (
    seq INTEGER PRIMARY KEY, rollout_id TEXT NOT NULL, reward REAL, metrics BLOB NOT NULL, advantage REAL, scored_by TEXT,
    at REAL NOT NULL
);
CREATE INDEX scores_by_rollout ON scores (rollout_id, seq);
CREATE TABLE steps (seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, metrics BLOB NOT NULL, at REAL NOT NULL);
CREATE TABLE updates (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, step INTEGER NOT NULL, version INTEGER NOT NULL, targets REAL, trained BLOB NOT NULL
);
CREATE TABLE openings (seq INTEGER PRIMARY KEY, version INTEGER NOT NULL, at REAL NOT NULL);
PRAGMA application_id = 1634890801;
PRAGMA user_version = 3;
INSERT INTO rollouts (rollout_id, task, started, finished) VALUES ('r', X'227422', 1.0, 2.0);
INSERT INTO scores (rollout_id, reward, metrics, advantage, scored_by, at)
    VALUES ('r', 0.25, X'7B2273756363657373223A317D', 0.5, 'mine', 3.0);
"""


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "run.sqlite") as store:
        yield store


@pytest.fixture
def old(tmp_path):
    """A file of version 3 with one scored rollout."""
    path = tmp_path / "old.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript("PRAGMA journal_mode = WAL;" + VERSION_3)
    db.close()
    return path


def test_notes_are_kept_with_the_score(store):
    store.add_rollout("r", task="t")
    store.finish_rollout("r")
    store.add_scores(["r"], [0.5], notes=[{"ruler": "half of it \ud800"}], by="ruler")
    assert store.trajectory("r").notes == {"ruler": "half of it \ud800"}
    store.add_scores(["r"], [None], notes=[{"unscored": "no JSON"}])
    (rollout,) = store.rollouts()
    assert rollout.notes == store.trajectories()[0].notes == {"unscored": "no JSON"}, "the newest counts"
    store.add_scores(["r"], [1.0])
    assert store.trajectory("r").notes == {}
    assert [(it.reward, it.by) for it in store.scores("r")] == [(0.5, "ruler"), (None, None), (1.0, None)]


def test_all_scores_of_a_rollout_are_there_oldest_first(store):
    store.add_scores(["r", "s"], [0.5, 0.0], metrics=[{"success": 1.0}, {}], advantages=[0.7, -0.7], by="mine")
    store.add_scores(["r"], [0.25], notes=[{"ruler": "why"}], by="ruler", aside=True)
    first, second = store.scores("r")
    assert (first.reward, first.metrics, first.notes) == (0.5, {"success": 1.0}, {})
    assert (first.advantage, first.by, first.aside) == (0.7, "mine", False)
    assert (second.reward, second.notes, second.by, second.aside) == (0.25, {"ruler": "why"}, "ruler", True)
    assert second.advantage is None and 0 < first.at <= second.at
    assert store.scores("never") == ()


def test_a_second_opinion_never_becomes_the_score(store):
    store.add_rollout("r", task="t")
    store.finish_rollout("r")
    store.add_scores(["r"], [1.0], notes=[{"judge": "a"}], aside=True)
    assert store.trajectory("r").reward is None and store.rollouts()[0].notes == {}, "also where there is no other"
    store.add_scores(["r"], [0.0], notes=[{"judge": "b"}], advantages=[-1.0])
    store.add_scores(["r"], [1.0], notes=[{"judge": "c"}], advantages=[1.0], aside=True)
    (rollout,) = store.rollouts()
    assert (rollout.reward, rollout.notes, rollout.advantage) == (0.0, {"judge": "b"}, -1.0)
    with pytest.raises(ValueError, match="cannot reward calls"):
        store.add_scores(["r"], [1.0], call_rewards=[[1.0]], aside=True)


@pytest.mark.system
def test_a_second_opinion_changes_nothing_that_a_run_says_of_itself(tmp_path):
    asyncio.run(record(tmp_path / "run"))

    def said():
        with Store(tmp_path / "run" / "run.sqlite") as store:
            rollouts = store.rollouts()
            trajectories = store.trajectories(), tuple(store.trajectory(it.rollout_id) for it in rollouts)
            return rollouts, trajectories, store.steps(), art.load_trajectories(tmp_path / "run", min_reward=0.5)

    before, audited = said(), art_audit.audit(tmp_path / "run", progress=False)
    assert audited.clean and len(before[-1]) == 1
    with Store(tmp_path / "run" / "run.sqlite") as store:
        ids = [it.rollout_id for it in before[0]]
        other = [1.0 - it.reward for it in before[0]]
        store.add_scores(
            ids, other, metrics=[{"success": 1.0}] * 2, notes=[{"judge": "no"}] * 2, by="judge", aside=True
        )
        assert [[it.by for it in store.scores(name)] for name in ids] == [["by_order", "judge"]] * 2
    assert said() == before
    assert art_audit.audit(tmp_path / "run", progress=False).as_json() == audited.as_json()


async def record(run_dir):
    def by_order(trajectory):
        trajectory.notes["order"] = "first come"
        return float(next(order))

    order = iter(range(2))
    async with art.open_run(run_dir, model="tiny") as run:
        groups = await run.collect(ScriptedAgent(max_tokens=4), ["one"], group_size=2)
        await run.learn(await run.score(groups, by_order))


# Files of version 3


def test_a_file_of_version_3_is_brought_up_when_it_is_opened(old):
    with Store(old) as store:
        assert store.trajectory("r") == art.Trajectory(
            task="t", calls=(), reward=0.25, metrics={"success": 1}, rollout_id="r"
        )
        (score,) = store.scores("r")
        assert (score.reward, score.notes, score.advantage, score.by) == (0.25, {}, 0.5, "mine")
        assert (score.at, score.aside) == (3.0, False)
        store.record("r", Call((1, 2), (3,), (-0.5,)))
        store.add_scores(["r"], [0.5], notes=[{"judge": "better"}])
        store.add_scores(["r"], [0.0], aside=True)
        found = store.trajectory("r")
        assert (found.reward, found.notes, len(found.calls)) == (0.5, {"judge": "better"}, 1)
    with Store(old) as store:
        assert [(it.reward, it.aside) for it in store.scores("r")] == [(0.25, False), (0.5, False), (0.0, True)]


def test_a_file_that_was_brought_up_has_the_tables_of_a_new_one(old, store):
    def columns(path):
        with sqlite3.connect(path) as db:
            found = [db.execute(f"PRAGMA table_info({name})").fetchall() for name in ("scores", "rollouts", "calls")]
            found.append(db.execute("PRAGMA user_version").fetchall())
        db.close()
        return found

    Store(old).close()
    assert columns(old) == columns(store.path)


@pytest.mark.system
def test_several_processes_may_bring_up_the_same_file(old):
    code = (
        "import sys; from art_core.store import Store; s = Store(sys.argv[1]); s.add_scores(['r'], [1.0], notes=[{'a': 'b'}]); "
        "s.close()"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code, old], stderr=subprocess.PIPE) for _ in range(4)]
    errors = [run.communicate(timeout=60)[1] for run in runs]
    assert errors == [b""] * 4
    with Store(old) as store:
        assert [it.notes for it in store.scores("r")] == [{}] + [{"a": "b"}] * 4


def test_another_process_that_was_faster_is_no_error(old, monkeypatch):
    """Between the look at the version and the transaction another process may do the same."""
    first = schema._bring_up

    def slow(connection, *migration):
        other = sqlite3.connect(old, isolation_level=None)
        first(other, *migration)
        other.close()
        first(connection, *migration)

    monkeypatch.setattr(schema, "_bring_up", slow)
    with Store(old) as store:
        assert store.trajectory("r").reward == 0.25


def test_another_process_that_made_the_file_first_is_no_error(tmp_path, monkeypatch):
    first = schema._create

    def slow(connection, path):
        monkeypatch.setattr(schema, "_create", first)
        Store(path).close()
        first(connection, path)

    monkeypatch.setattr(schema, "_create", slow)
    with Store(tmp_path / "run.sqlite") as store:
        assert store.rollouts() == ()


def test_a_file_that_could_not_be_brought_up_whole_stays_as_it_was(old, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(schema.MIGRATIONS, 3, (*schema.MIGRATIONS[3], "not SQL"))
        with pytest.raises(StoreError, match="cannot read"):
            Store(old)
    with sqlite3.connect(old) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (3,)
        assert len(db.execute("PRAGMA table_info(scores)").fetchall()) == 7
    db.close()
    with Store(old) as store:
        assert store.trajectory("r").reward == 0.25


@pytest.mark.parametrize("version", [2, 6])
def test_a_file_of_another_version_is_refused_and_left_alone(old, version):
    with sqlite3.connect(old) as db:
        db.execute(f"PRAGMA user_version = {version}")
    db.close()
    with pytest.raises(
        StoreError, match=f"version {version} of the store's tables, this art_core reads versions 3 to 5"
    ):
        Store(old)
    with sqlite3.connect(old) as db:
        assert len(db.execute("PRAGMA table_info(scores)").fetchall()) == 7
    db.close()
