"""The run's file: what goes in comes out, from other threads and processes, and after the disk was full."""

import dataclasses
import math
import operator
import sqlite3
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import short_call as call

from art_audit.ledger import read_calls
from art_audit.report import Findings
from art_core.errors import StoreError
from art_core.loop.display import display
from art_core.store import Store, recent
from art_core.types import Call, Trajectory


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "run.sqlite") as store:
        yield store


texts = st.text(st.characters(), max_size=8)
messages = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": texts})
floats = st.one_of(st.floats(width=32, allow_nan=False), st.floats(allow_nan=False))


def test_a_name_and_an_error_that_are_no_utf8_come_back(tmp_path):
    with Store(tmp_path / "run.sqlite") as store:
        store.add_rollout("r", task="t")
        store.record("r", call(agent="\ud800"))
        store.finish_rollout("r", error="no file \udcff")
    with Store(tmp_path / "run.sqlite") as store:
        assert store.calls("r")[0].agent == "\ud800"
        assert store.trajectory("r").error == "no file \udcff"


@st.composite
def conversations(draw) -> list[tuple[str, Call]]:
    """Calls that extend, fork and compact each other, over three rollouts; none is another's retry."""
    start = draw(st.lists(st.integers(0, 9), min_size=1, max_size=40))
    made: list[tuple[str, Call]] = []
    for number in range(draw(st.integers(1, 12))):
        base, said = (start, [])
        if made and draw(st.booleans()):
            earlier = draw(st.sampled_from(made))[1]
            base, said = [*earlier.prompt_ids, *earlier.sampled_ids], list(earlier.request.get("messages", []))
        cut = draw(st.integers(1, len(base)))
        prompt = tuple(base[:cut] + draw(st.lists(st.integers(0, 2**31 - 1), max_size=5)))
        sampled = tuple(draw(st.lists(st.integers(0, 200_000), max_size=5)))
        request = draw(st.dictionaries(st.sampled_from(["model", "user", "x"]), texts))
        request |= draw(st.sampled_from([{}, {"tools": []}, {"tools": [{"type": "function"}]}, {"messages": []}]))
        if draw(st.booleans()):
            request["messages"] = said + draw(st.lists(messages, max_size=3))
        made.append(
            (
                draw(st.sampled_from("abc")),
                Call(
                    prompt,
                    sampled,
                    tuple(draw(st.lists(floats, min_size=len(sampled), max_size=len(sampled)))),
                    policy_version=draw(st.integers(0, 9)),
                    agent=draw(st.none() | texts),
                    request_id=draw(st.sampled_from(["", f"q{number // 3}"])),
                    choice=number % 3,
                    reward=draw(st.none() | st.floats(-1, 1)),
                    temperature=draw(st.floats(0, 2)),
                    finish_reason=draw(st.sampled_from(["stop", "length", "tool_calls"])),
                    forced=tuple(p for p in draw(st.lists(st.integers(0, 4), max_size=2)) if p < len(sampled)),
                    request=request,
                    response=draw(messages),
                ),
            )
        )
    return made


@pytest.mark.system
@settings(deadline=None, max_examples=60)
@given(conversations(), st.data())
def test_calls_come_back_exactly_as_they_were(made, data):
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "run.sqlite") as store:
        for rollout_id, one in made:
            store.record(rollout_id, one)
            if data.draw(st.booleans()):
                store._calls.forget()
        for rollout_id in "abc":
            assert store.calls(rollout_id) == tuple(one for owner, one in made if owner == rollout_id)


def test_logprobs_take_four_bytes_where_that_loses_nothing_and_eight_where_it_would(store):
    short, long = float(np.float32(-0.1)), -0.1
    store.record("r1", Call((1,), (2, 3), (short, -math.inf)))
    store.record("r1", Call((1,), (2,), (long,)))
    assert [one.logprobs for one in store.calls("r1")] == [(short, -math.inf), (long,)]
    with sqlite3.connect(store.path) as db:
        assert db.execute("SELECT length(logprobs) FROM calls").fetchall() == [(8,), (8,)]
    db.close()


def test_a_retry_replaces_an_answer_that_was_lost_on_its_way_but_no_other_call_with_its_id(store):
    asked, other = ({"model": "m", "messages": [{"role": "user", "content": text}]} for text in ("a", "b"))
    for request in (asked, other, asked):
        store.record("r1", call([1], request_id="q1", request=request))
    assert [one.request["messages"][0]["content"] for one in store.calls("r1")] == ["b", "a"]


def test_a_retry_replaces_its_aborted_predecessor_and_nothing_else(store):
    store.record("r1", call([1], request_id="q1", choice=0, finish_reason="aborted"))
    store.record("r1", call([1], request_id="q1", choice=1, finish_reason="aborted"))
    store.record("r2", call([2], request_id="q1", finish_reason="aborted"))
    store.record("r1", call([3], request_id="q2", finish_reason="aborted"))
    store.record("r1", call([1], request_id="q1", choice=0))
    store.record("r1", call([1], request_id="q1", choice=1))
    assert [(one.request_id, one.choice, one.finish_reason) for one in store.calls("r1")] == [
        ("q2", 0, "aborted"),
        ("q1", 0, "stop"),
        ("q1", 1, "stop"),
    ]
    assert len(store.calls("r2")) == 1
    with sqlite3.connect(store.path) as db:
        assert db.execute("SELECT count(*), sum(replaced) FROM calls").fetchone() == (6, 2)
    db.close()


def test_a_conversation_of_two_hundred_turns_grows_by_what_is_new(tmp_path):
    def size(turns: int) -> int:
        path = tmp_path / f"{turns}.sqlite"
        tools = [{"type": "function", "function": {"name": "search", "description": "x" * 2000}}]
        with Store(path) as store:
            prompt, said = list(range(500)), [{"role": "system", "content": "x" * 500}]
            for turn in range(turns):
                said = [*said, {"role": "user", "content": f"{turn} " * 20}]
                answer = {"role": "assistant", "content": f"{turn} " * 30}
                request = {"messages": said, "tools": tools}
                sampled = range(turn, turn + 40)
                store.record("r1", call(prompt, sampled, request=request, response=answer))
                prompt, said = [*prompt, *sampled, *range(30)], [*said, answer]
            last = store.calls("r1")[-1]
            assert len(last.prompt_ids) == 500 + 70 * (turns - 1)
            assert len(last.request["messages"]) == 2 * turns
        return path.stat().st_size

    fixed = size(1)
    assert size(200) - fixed < 2.2 * (size(100) - fixed)
    assert size(200) < 500_000


def test_the_first_prompts_of_a_group_share_their_system_prompt(store):
    for number in range(20):
        store.record(f"r{number}", call([*range(1000), number]))
    assert [store.calls(f"r{number}")[0].prompt_ids[-1] for number in range(20)] == list(range(20))
    with sqlite3.connect(store.path) as db:
        assert db.execute("SELECT sum(length(suffix)) FROM calls").fetchone()[0] < 4 * 1100
    db.close()


def test_the_calls_of_some_requests_are_found_among_many(store):
    made = [
        call(
            range(1, 50 + turn),
            (7, 8),
            request_id=f"q{turn}",
            request={"messages": [{"role": "user", "content": str(turn)}]},
        )
        for turn in range(20)
    ]
    several = [dataclasses.replace(made[5], choice=choice) for choice in (0, 1)]
    for it in (*made[:5], *several, *made[6:]):
        store.record("r", it)
    store.record("other", made[7])
    assert store.calls_of("r", ["q12", "q5"]) == (*several, made[12])
    assert store.calls_of("r", []) == store.calls_of("none", ["q1"]) == ()


@pytest.mark.parametrize("reopened", [False, True])
def test_calls_build_on_what_was_forgotten_or_written_by_another_store(tmp_path, monkeypatch, reopened):
    for name, most in (("TOKENS_REMEMBERED", 10), ("ROLLOUTS_REMEMBERED", 1), ("REFERENCES_REMEMBERED", 2)):
        monkeypatch.setattr(recent, name, most)
    made = {name: [] for name in "abc"}
    store = Store(tmp_path / "run.sqlite")
    for name in made:
        store.add_rollout(name, task=name)
    for turn in range(6):
        for number, name in enumerate(made):
            before = made[name][-1] if turn else call((number,), ())
            prompt = (*before.prompt_ids, *before.sampled_ids, *range(50))
            said = [{"role": "user", "content": f"{name} {turn}"} for turn in range(turn + 1)]
            made[name].append(call(prompt, (7, 8), request={"messages": said}))
            store.record(name, made[name][-1])
        if reopened:
            store.close()
            store = Store(tmp_path / "run.sqlite")
    for name, calls in made.items():
        assert store.calls(name) == tuple(calls)
    store.close()
    with sqlite3.connect(tmp_path / "run.sqlite") as db:
        suffixes = [length for (length,) in db.execute("SELECT length(suffix) / 4 FROM calls")]
    db.close()
    assert suffixes == [51] * 3 + [50] * 15
    findings = Findings()
    with Store(tmp_path / "run.sqlite") as store, display(False) as screen:
        read_calls(store, findings, screen)
    assert not findings.problems, "the chain of digests goes on"


def test_a_rollout_of_a_thousand_calls_is_continued_after_the_store_was_reopened(tmp_path):
    made = [call(range(1 + 2 * turn), (2 * turn + 1,), request_id=f"q{turn}") for turn in range(1001)]
    with Store(tmp_path / "run.sqlite") as store:
        for it in made[:-1]:
            store.record("r", it)
    with Store(tmp_path / "run.sqlite") as store:
        store.record("r", made[-1])
        assert store.calls_of("r", ["q0", "q1000"]) == (made[0], made[-1])
        assert store.calls("r") == tuple(made)


@pytest.mark.parametrize("reopened", [False, True])
def test_a_retry_replaces_its_predecessor_even_when_that_was_forgotten(tmp_path, monkeypatch, reopened):
    monkeypatch.setattr(recent, "ROLLOUTS_REMEMBERED", 1)
    store = Store(tmp_path / "run.sqlite")
    store.record("r", call(request_id="q", finish_reason="aborted"))
    store.record("r", call(request_id="p"))
    store.record("s", call())
    if reopened:
        store.close()
        store = Store(tmp_path / "run.sqlite")
    store.record("r", call((9, 9), request_id="q"))
    assert [it.prompt_ids for it in store.calls("r")] == [(1, 2, 3), (9, 9)]
    store.close()


def test_sub_agents_that_take_turns_share_their_prompts_even_if_the_rollout_was_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(recent, "ROLLOUTS_REMEMBERED", 1)
    with Store(tmp_path / "run.sqlite") as store:
        for turn in range(6):
            for rollout in "rs":
                for agent in range(4):
                    store.record(rollout, call((agent, *range(100 * (turn + 1))), (7,)))
        assert len(store.calls("r")) == 24
    with sqlite3.connect(tmp_path / "run.sqlite") as db:
        [stored] = db.execute("SELECT sum(length(suffix)) / 4 FROM calls").fetchone()
    db.close()
    assert stored < 2 * 4 * (600 + 6 + 100), "each prompt is stored once, not once per turn"


def test_calls_share_the_integers_of_a_common_start(store):
    first = call(tuple(range(1000, 2000)), (3000,))
    store.record("r", first)
    store.record("r", call((*first.prompt_ids, *first.sampled_ids, 4000), (5000,)))
    before, after = store.calls("r")
    assert all(map(operator.is_, before.prompt_ids + before.sampled_ids, after.prompt_ids))


def test_who_cannot_know_when_a_rollout_ends_says_it_after_every_call(store):
    store.add_rollout("r", task="t")
    assert store.has_rollout("r") and not store.has_rollout("s")
    assert store.trajectories() == ()
    store.record("r", call())
    store.touch_rollout("r")
    [trajectory] = store.trajectories()
    assert len(trajectory.calls) == 1
    store.finish_rollout("r", output="done", error="late", seconds=3.0)
    store.record("r", call())
    store.touch_rollout("r")
    [trajectory] = store.trajectories()
    assert (len(trajectory.calls), trajectory.output, trajectory.error) == (2, "done", "late")
    assert trajectory.seconds < 3.0


def test_a_rollout_comes_back_as_a_trajectory_with_its_newest_scores(store):
    store.add_rollout("r1", task={"input": "2+2"}, step=3, split="train", task_id="t1", group="g1")
    store.add_rollout("r2", task="other", step=3, split="train")
    store.add_rollout("r3", task="held out", step=3, split="eval")
    store.record("r1", call())
    store.finish_rollout("r1", output={"answer": "4"}, seconds=1.5)
    store.finish_rollout("r2", error="ValueError: no")
    store.add_scores(["r1", "r2"], [np.float32(0.5), None], metrics=[{"success": 1.0}, {}], by="ruler")
    store.add_scores(["r1", "r2"], [1.0, 0.0], metrics=[{"success": 0.0}, {}], advantages=[0.7, -0.7], by="fixed")
    assert store.trajectory("r1") == Trajectory(
        task={"input": "2+2"},
        calls=(call(),),
        output={"answer": "4"},
        reward=1.0,
        metrics={"success": 0.0},
        rollout_id="r1",
        seconds=1.5,
    )
    assert [t.rollout_id for t in store.trajectories(split="train", step=3)] == ["r1", "r2"]
    assert store.trajectories(step=4) == ()
    first, second, third = store.rollouts()
    assert (first.group, first.task_id, first.step, first.advantage) == ("g1", "t1", 3, 0.7)
    assert (second.error, second.finished, second.reward) == ("ValueError: no", True, 0.0)
    assert (third.finished, third.split) == (False, "eval")
    with sqlite3.connect(store.path) as db:
        assert db.execute("SELECT reward, scored_by FROM scores WHERE rollout_id = 'r1'").fetchall() == [
            (0.5, "ruler"),
            (1.0, "fixed"),
        ]
    db.close()


def test_a_rollout_that_was_never_added_is_an_error(store):
    with pytest.raises(StoreError, match="no rollout 'r9'"):
        store.trajectory("r9")


def test_a_rollout_cannot_begin_twice_even_after_the_store_was_reopened(store):
    store.add_rollout("r1", task=1)
    store.flush()
    with Store(store.path) as again, pytest.raises(StoreError, match="already has a rollout 'r1'"):
        again.add_rollout("r1", task=1)


def test_meta_and_steps_are_kept(store):
    store.set_meta("config", {"seed": 1})
    store.set_meta("config", {"seed": 2})
    store.add_step(0, {"loss": math.nan})
    store.add_step(1, {"loss": 0.5})
    assert store.meta("config") == {"seed": 2}
    assert store.meta("nothing", 7) == 7
    (zero, first), second = store.steps()
    assert zero == 0
    assert math.isnan(first["loss"])
    assert second == (1, {"loss": 0.5})


@dataclasses.dataclass
class Answer:
    text: str
    where: Path


class Opaque:
    def __repr__(self) -> str:
        return "<an opaque thing>"


def test_an_output_that_json_cannot_say_is_kept_as_well_as_it_can_be(store):
    messages = pytest.importorskip("langchain_core.messages")
    loop: list = []
    loop.append(loop)
    outputs = {
        "message": {"messages": [messages.HumanMessage("hi")]},
        "dataclass": Answer("42", Path("/tmp")),
        "opaque": [Opaque(), {1, 2}, np.arange(2), 10**30, "\ud800"],
        "keys": {(1, 2): 3},
        "loop": loop,
    }
    for name, output in outputs.items():
        store.add_rollout(name, task=None)
        store.finish_rollout(name, output=output)
    kept = {name: store.trajectory(name).output for name in outputs}
    assert kept["message"]["messages"][0]["content"] == "hi"
    assert kept["dataclass"] == {"text": "42", "where": "PosixPath('/tmp')"}
    assert kept["opaque"] == ["<an opaque thing>", [1, 2], [0, 1], 10**30, "\ud800"]
    assert kept["keys"] == "{(1, 2): 3}"
    assert kept["loop"] == "[[...]]"


def test_calls_are_rewarded_after_they_were_recorded(store):
    store.add_rollout("r1", task="t")
    store.record("r1", call(request_id="a", finish_reason="aborted"))
    store.record("r1", call(request_id="a"))  # takes the place of the one before
    store.record("r1", call(request_id="b", reward=0.25))
    store.record("r1", call(request_id="c"))
    a, b, c = store.calls("r1")
    a, c = dataclasses.replace(a, reward=np.float32(0.5)), dataclasses.replace(c, reward=0.75)
    store.add_scores(["r1"], [1.0], calls=[[a, b, c]])
    assert [call.reward for call in store.calls("r1")] == [0.5, 0.25, 0.75]
    store.add_scores(["r1"], [1.0], calls=[[dataclasses.replace(b, reward=None), dataclasses.replace(c, reward=0.0)]])
    assert [call.reward for call in store.calls("r1")] == [0.5, None, 0.0], "whatever their place in the list"
