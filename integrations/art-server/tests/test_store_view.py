"""Looking at a run's file: while others write it, and without leaving a trace."""

import os
import sqlite3
import subprocess
import sys

import pytest
from recorded_runs import record

from art_core.errors import StoreError
from art_core.store import Store
from art_server.store_view import RolloutFilter, read_snapshot

CRASHES = """
import os, sys
from art_core.store import Store
store = Store(sys.argv[1])
store.add_rollout("left", task="t", step=1, split="train")
store.flush()
os._exit(1)
"""


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def names(path, **wanted):
    total, found = read_snapshot(
        path, lambda view: view.rollouts(RolloutFilter(**wanted), limit=500, offset=0, order="oldest")
    )
    assert total == len(found)
    return [it.stored.rollout_id for it in found]


def test_looking_at_a_run_that_nobody_writes_leaves_its_folder_as_it_was(tmp_path):
    folder = record(tmp_path / "run")
    before = contents(folder)
    assert len(names(folder / "run.sqlite")) == 24
    assert contents(folder) == before


def test_what_another_store_has_just_written_is_seen(tmp_path):
    with Store(tmp_path / "run.sqlite") as store:
        for number in range(3):
            store.add_rollout(f"r{number}", task="t", step=number, split="train")
            store.flush()
            assert names(tmp_path / "run.sqlite") == [f"r{it}" for it in range(number + 1)]


def test_a_look_holds_up_no_writer(tmp_path):
    with Store(tmp_path / "run.sqlite") as store:
        store.set_meta("model", "tiny")
        store.flush()

        def ask(view):
            before = view.meta("model")
            store.set_meta("model", "other")
            store.flush()
            return before, view.meta("model")

        assert read_snapshot(tmp_path / "run.sqlite", ask) == ("tiny", "tiny")
        assert read_snapshot(tmp_path / "run.sqlite", lambda view: view.meta("model")) == "other"


@pytest.mark.system
def test_what_a_killed_process_had_written_is_seen_and_stays_where_it_is(tmp_path):
    file = tmp_path / "run.sqlite"
    subprocess.run([sys.executable, "-c", CRASHES, str(file)], check=False)
    log = (tmp_path / "run.sqlite-wal").read_bytes()
    assert names(file) == ["left"]
    assert (tmp_path / "run.sqlite-wal").read_bytes() == log and log
    with Store(file) as store:
        assert store.has_rollout("left")


def test_a_run_that_goes_on_while_it_is_looked_at_is_looked_at_again(tmp_path):
    folder, asked = record(tmp_path / "run"), []

    def ask(view):
        asked.append(view.step_counts())
        if len(asked) == 1:
            with Store(folder / "run.sqlite") as store:
                store.add_step(4, {"reward": 1.0})
        return asked[-1]

    assert read_snapshot(folder / "run.sqlite", ask) == (4, 4)
    assert len(asked) == 2


def test_a_folder_that_cannot_be_written_can_be_looked_at(tmp_path):
    folder = record(tmp_path / "run")
    (folder / "run.sqlite").chmod(0o400)
    folder.chmod(0o500)
    try:
        assert len(names(folder / "run.sqlite")) == 24
    finally:
        folder.chmod(0o700)


def test_a_step_that_was_done_again_is_told_as_it_was_done_last(tmp_path):
    with Store(tmp_path / "run.sqlite") as store:
        for step, reward in [(1, 0.1), (2, 0.2), (2, 0.9), (3, 0.3)]:
            store.add_step(step, {"reward": reward})
    steps = read_snapshot(tmp_path / "run.sqlite", lambda view: view.steps(after=1, limit=10))
    assert [(step, metrics["reward"]) for step, _, metrics in steps] == [(2, 0.9), (3, 0.3)]


def test_pages_of_groups_add_up_to_all_rollouts(tmp_path):
    folder = record(tmp_path / "run", steps=4, tasks=3, group_size=2)
    found = []
    for offset in range(0, 12, 5):
        total, page = read_snapshot(
            folder / "run.sqlite", lambda view, at=offset: view.groups(RolloutFilter(), limit=5, offset=at)
        )
        assert total == 12
        found += page
    assert len(found) == 12
    assert sorted(it.stored.rollout_id for group in found for it in group) == sorted(names(folder / "run.sqlite"))


def test_a_rollout_of_no_group_is_one_of_its_own(tmp_path):
    with Store(tmp_path / "run.sqlite") as store:
        store.add_rollout("a", task="t")
        store.add_rollout("b", task="t")
    assert names(tmp_path / "run.sqlite", group="b") == ["b"]
    total, found = read_snapshot(tmp_path / "run.sqlite", lambda view: view.groups(RolloutFilter(), limit=5, offset=0))
    assert total == 2 and [[it.stored.rollout_id for it in group] for group in found] == [["b"], ["a"]]


def test_what_is_no_run_is_refused_in_words(tmp_path):
    with pytest.raises(StoreError, match="pass a run folder"):
        read_snapshot(tmp_path / "run.sqlite", lambda view: None)
    (tmp_path / "run.sqlite").write_text("no database" * 100)
    with pytest.raises(StoreError, match="damaged"):
        read_snapshot(tmp_path / "run.sqlite", lambda view: None)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    with pytest.raises(StoreError, match="but not an art store"):
        read_snapshot(other, lambda view: None)
    assert not os.path.exists(f"{other}-wal")


def test_a_file_of_another_version_is_not_changed_but_refused(tmp_path):
    folder = record(tmp_path / "run")
    with sqlite3.connect(folder / "run.sqlite") as db:
        db.execute("PRAGMA user_version = 3")
    db.close()
    with pytest.raises(StoreError, match="version 3"):
        read_snapshot(folder / "run.sqlite", lambda view: None)
