"""The run's file under threads, kills, full disks and strangers: what was recorded is kept, what cannot be is told."""

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing

import pytest
from recorded_runs import short_call as call

from art_core.errors import StoreError
from art_core.store import Store, writer


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "run.sqlite") as store:
        yield store


def test_sixty_four_threads_write_while_another_store_reads(store):
    def write(number: int) -> None:
        for turn in range(10):
            store.record(f"r{number}", call([number, turn]))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    with Store(store.path) as other:
        other.add_rollout("r0", task=None)
        while any(thread.is_alive() for thread in threads):
            assert len(other.calls("r0")) <= 10
        for thread in threads:
            thread.join()
        store.flush()
        for number in range(64):
            assert [one.prompt_ids for one in other.calls(f"r{number}")] == [(number, turn) for turn in range(10)]


def test_a_sync_brings_the_newest_to_the_disk_also_beside_a_reader_that_began_before(store, tmp_path, monkeypatch):
    disk, log, sync = tmp_path / "disk", tmp_path / "run.sqlite-wal", os.fsync
    disk.mkdir()
    brought = []

    def note(descriptor):
        sync(descriptor)
        brought.append(os.fstat(descriptor).st_ino)
        if brought[-1] == log.stat().st_ino:  # what a loss of power leaves
            for file in (store.path, log):
                shutil.copyfile(file, disk / file.name)

    store.set_meta("before", 1)
    store.flush()
    with closing(sqlite3.connect(store.path, isolation_level=None)) as reader:
        assert reader.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
        reader.execute("BEGIN")  # with an empty log
        assert reader.execute("SELECT count(*) FROM meta").fetchone() == (1,)
        store.set_meta("after", 2)
        monkeypatch.setattr("os.fsync", note)
        store.sync()
    assert brought == [log.stat().st_ino, tmp_path.stat().st_ino]
    with Store(disk / "run.sqlite") as left:
        assert (left.meta("before"), left.meta("after")) == (1, 2)


WRITER = """
import os, sys
from art_core.store import Store
from art_core.types import Call
store = Store(sys.argv[1])
for number in range(1000):
    store.record("r1", Call((1, number), (2,), (-0.5,)))
    if number % 100 == 99:
        store.flush()
        print(number + 1, flush=True)
    if number == 550:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.system
def test_what_was_flushed_survives_a_kill(tmp_path):
    path = tmp_path / "run.sqlite"
    run = subprocess.run([sys.executable, "-c", WRITER, path], capture_output=True, text=True, timeout=60)
    assert run.stdout.split()[-1] == "500", run.stderr
    with Store(path) as store:
        assert 500 <= len(store.calls("r1")) <= 551


FULL = """
import resource, sys
from art_core.errors import StoreError
from art_core.store import Store
from art_core.types import Call

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def call(number):
    return Call((number, *range(2000)), (2,), (-0.5,), response={"content": str(number) * 3000})

store = Store(sys.argv[1])
store.record("r1", call(0))
store.flush()
limit(200_000)
failed = 0
for number in range(1, 100):
    try:
        store.record("r1", call(number))
        store.flush()
    except StoreError as error:
        failed += 1
        message = str(error)
print(failed, message)
assert failed > 5
limit(resource.RLIM_INFINITY)
store.flush()
assert [one.prompt_ids[0] for one in store.calls("r1")] == list(range(100))
store.close()
print("all there")
"""


@pytest.mark.system
def test_a_full_disk_loses_nothing_and_writing_goes_on_when_there_is_room(tmp_path):
    path = tmp_path / "run.sqlite"
    run = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True, timeout=60)
    assert run.stdout.endswith("all there\n"), run.stderr
    assert f"cannot write to {path}" in run.stdout
    assert "nothing that was recorded before is lost" in run.stdout
    assert "free space" in run.stdout


def test_a_record_that_can_never_be_written_is_told_once_and_holds_up_no_other(tmp_path, caplog):
    with Store(tmp_path / "run.sqlite") as store:
        store.add_rollout("r", task="t")
        store.record("r", call((1,)))
        store.record("r", call((1,), policy_version=2**63))
        store.record("r", call((1, 4, 5, 6)))
        with pytest.raises(StoreError, match="1 records can't be written.*OverflowError"):
            store.flush()
        assert "left out" in caplog.text
        store.record("r", call((7,)))
    with Store(tmp_path / "run.sqlite") as store:
        assert [one.prompt_ids for one in store.calls("r")] == [(1,), (1, 4, 5, 6), (7,)]


@pytest.mark.parametrize("table", ["blobs", "messages"])
def test_a_file_whose_index_lost_a_row_gets_the_call_once_it_is_mended(store, table):
    store.flush()
    with closing(sqlite3.connect(store.path, isolation_level=None)) as db:
        db.execute(f"CREATE TRIGGER lost BEFORE INSERT ON {table} BEGIN SELECT RAISE(IGNORE); END")
        store.record("r1", call([1, 2], request={"messages": [{"role": "user", "content": "a"}]}))
        with pytest.raises(StoreError, match="an existing row can't be found"):
            store.flush()
        db.execute("DROP TRIGGER lost")
    assert [it.prompt_ids for it in store.calls("r1")] == [(1, 2)]


def test_a_record_is_left_out_and_the_disk_full_at_once_and_all_others_are_kept(tmp_path, monkeypatch):
    commits = []

    def commit(connection, writes, write=writer._commit):
        commits.append(len(writes))
        if 4 <= len(commits) < 6:
            raise sqlite3.OperationalError("database or disk is full")
        write(connection, writes)

    with Store(tmp_path / "run.sqlite") as store:
        monkeypatch.setattr(writer, "_commit", commit)
        monkeypatch.setattr(writer, "GATHER_SECONDS", 60.0)
        for number in range(4):
            store.record("r", call((number,), policy_version=2**63 if number == 1 else 0))
        for failure in ("disk is full", "disk is full", "can't be written"):
            with pytest.raises(StoreError, match=failure):
                store.flush()
        assert commits == [4, 1, 1, 1, 2, 2]
        assert [one.prompt_ids for one in store.calls("r")] == [(0,), (2,), (3,)]


def test_a_file_that_is_no_store_is_refused(tmp_path):
    text = tmp_path / "text.sqlite"
    text.write_text("not a database, but long enough to be taken for one " * 100)
    with pytest.raises(StoreError, match="not a run's store"):
        Store(text)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE something (x)")
    db.close()
    with pytest.raises(StoreError, match="but not an art store"):
        Store(other)


def test_a_store_of_another_version_is_refused(store):
    store.close()
    with sqlite3.connect(store.path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match="version 99"):
        Store(store.path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file/run.sqlite"):
        Store(tmp_path / "file" / "run.sqlite")


def test_a_new_store_waits_for_a_process_that_is_creating_it_too(tmp_path):
    path = tmp_path / "run.sqlite"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.1, lambda: other.execute("ROLLBACK"))
    release.start()
    Store(path).close()
    release.join()
    other.close()


@pytest.mark.smoke
@pytest.mark.system
def test_several_processes_may_make_the_same_store(tmp_path):
    path = tmp_path / "run.sqlite"
    code = "import sys; from art_core.store import Store; s = Store(sys.argv[1]); s.add_step(1, {}); s.close()"
    runs = [subprocess.Popen([sys.executable, "-c", code, path], stderr=subprocess.PIPE) for _ in range(4)]
    errors = [run.communicate(timeout=60)[1] for run in runs]
    assert errors == [b""] * 4
    with Store(path) as store:
        assert len(store.steps()) == 4


def test_a_closed_store_says_so(store):
    store.close()
    store.close()
    with pytest.raises(StoreError, match="was closed"):
        store.record("r1", call())
    with pytest.raises(StoreError, match="was closed"):
        store.calls("r1")
