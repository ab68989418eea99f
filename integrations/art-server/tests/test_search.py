"""Rollouts are found by their texts and their results, and the run folder stays as it was."""

import sqlite3

import pytest
from kinds_of_runs import TASKS, run_of
from recorded_runs import call, record
from test_reading import asked, store_in

from art_core.store import Store
from art_server import search
from art_server.search import Index, Indexes


async def found(folder, **wanted):
    page = await asked(folder, f"/api/runs/{folder.name}/trajectories", **wanted, limit=500)
    assert page["total"] == len(page["items"])
    return [rollout["rollout_id"] for rollout in page["items"]]


@pytest.fixture
def folder(tmp_path):
    """A run with a rollout of two calls, one that failed, one without a reward, and one that hasn't finished."""
    with store_in(tmp_path / "run") as store:
        for name in ("whole", "failed", "unscored", "open"):
            store.add_rollout(name, task={"input": f"Find the {name} invoice"}, step=1, split="train", task_id=name)
        question = {"role": "user", "content": "Who paid the café\nin Zürich?"}
        answer = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"arguments": '{"query": "espresso"}'}}],
        }
        system = {"role": "system", "content": "Be brief."}
        store.record("whole", call((1,), (2,), messages=[system, question], answer="I look it up.", request_id="a"))
        result = {"role": "tool", "content": "Paid by Ada"}
        store.record(
            "whole", call((1, 2), (3,), messages=[system, question, answer, result], answer="Ada did.", agent="clerk")
        )
        for name in ("whole", "unscored"):
            store.finish_rollout(name, output={"messages": ["Ada did."]})
        store.finish_rollout("failed", error="ValueError: no such mailbox")
        store.add_scores(
            ["whole", "failed"], [0.75, 0.0], metrics=[{"success": 1.0}, {}], notes=[{"why": "names the payer"}, {}]
        )
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("search", "names"),
    [
        ("invoice", ["unscored", "failed", "whole"]),
        ("ada paid", ["whole"]),
        ('"paid by"', ["whole"]),
        ('"by paid"', []),
        ("zurich", ["whole"]),
        ("CAFE", ["whole"]),
        ("espre", ["whole"]),
        ("payer", ["whole"]),
        ("mailbox", ["failed"]),
        ("brief", []),
        ("role content", []),
        ("assistant", []),
        ("ada\0paid", ["whole"]),
        ('"', []),
        ("NOT", []),
        ("-*", []),
    ],
)
async def test_words_are_found_in_tasks_messages_errors_and_notes(folder, search, names):
    assert await found(folder, search=search) == names


async def test_a_rollout_is_found_once_it_has_finished(folder):
    index = Index(folder / "run.sqlite")
    assert index.find("open") == []
    with Store(folder / "run.sqlite") as store:
        store.finish_rollout("open", output="x")
        store.add_rollout("later", task="another open case", step=2, split="train")
    assert index.find("open") == [4]
    with Store(folder / "run.sqlite") as store:
        store.finish_rollout("later", output="x")
    assert index.find("open") == [4, 5]


async def test_a_search_goes_with_the_other_filters(folder):
    assert await found(folder, search="invoice", outcome="success") == ["whole"]
    assert await found(folder, search="invoice", step=2) == []


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ({"outcome": "success"}, ["whole"]),
        ({"outcome": "error"}, ["failed"]),
        ({"outcome": "unscored"}, ["unscored"]),
        ({"outcome": "failure"}, []),
        ({"at_least": 0.5}, ["whole"]),
        ({"at_most": 0.5}, ["failed"]),
        ({"agent": "clerk"}, ["whole"]),
        ({"order": "lowest"}, ["failed", "whole", "open", "unscored"]),
        ({"order": "highest"}, ["whole", "failed", "open", "unscored"]),
        ({"order": "oldest"}, ["whole", "failed", "unscored", "open"]),
    ],
)
async def test_rollouts_are_filtered_and_sorted_by_result(folder, wanted, names):
    assert await found(folder, **wanted) == names


async def test_a_run_lists_its_agents(folder):
    assert (await asked(folder, "/api/runs/run"))["agents"] == ["clerk", "team/writer"]


async def test_a_search_leaves_the_folder_as_it_was(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert await found(folder, search="ada")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


async def test_a_note_that_is_stored_later_is_found(folder):
    index = Index(folder / "run.sqlite")
    assert index.find("espresso") == [1] and index.find("mistaken") == []
    with Store(folder / "run.sqlite") as store:
        store.add_scores(["whole"], [0.1], notes=[{"why": "mistaken after all"}])
    assert index.find("espresso mistaken") == [1]


def test_a_new_run_in_the_same_folder_is_indexed_anew(folder):
    index = Index(folder / "run.sqlite")
    assert index.find("invoice") == [1, 2, 3]
    for file in folder.iterdir():
        file.unlink()
    record(folder)
    assert index.find("invoice") == [] and len(index.find("question")) == 24


def test_many_rollouts_are_read_in_several_snapshots(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "AT_ONCE", 5)
    monkeypatch.setattr(search, "NEW", search.NEW.replace(str(2_000), "5"))
    assert len(Index(record(tmp_path) / "run.sqlite").find("question")) == 24


def test_a_row_that_cannot_be_decoded_is_passed_over(folder):
    with sqlite3.connect(folder / "run.sqlite") as db:
        db.execute("UPDATE rollouts SET task = ? WHERE rollout_id = 'failed'", (b"{",))
    index = Index(folder / "run.sqlite")
    assert index.find("invoice") == [1, 3] and index.find("mailbox") == [2]


def test_only_the_indexes_of_the_last_runs_are_kept(tmp_path):
    indexes = Indexes()
    first = indexes.of(tmp_path / "0")
    assert indexes.of(tmp_path / "0") is first
    for number in range(1, 9):
        indexes.of(tmp_path / str(number))
    assert indexes.of(tmp_path / "0") is not first


async def test_tasks_that_changed_are_listed_the_lost_ones_first(tmp_path):
    page = await asked(run_of(tmp_path / "run", "improved"), "/api/runs/run/changed-tasks")
    assert page["total"] == 23 and [task["change"] for task in page["items"]] == [-1.0] + [1.0] * 22
    first = page["items"][0]
    assert (first["task_id"], first["before"], first["after"]) == ("task0", "before-0", "after-0")
    flat = await asked(run_of(tmp_path / "crashed", "crashed"), "/api/runs/crashed/changed-tasks")
    assert flat["items"] == [] and TASKS == 40
