"""Scores in the run's file: explanations, second opinions that never count."""

import asyncio
from dataclasses import replace

import pytest

import art_audit
import art_core as art
from art_core.store import Store, schema
from art_core.testing import ScriptedAgent
from art_core.types import Call


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "run.sqlite") as store:
        yield store


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
        store.add_scores(["r"], [1.0], calls=[[]], aside=True)


def test_calls_without_a_request_id_have_rewards_of_their_own(store):
    store.add_rollout("r", task="t")
    for number, request_id in enumerate(["", "q", "", ""]):
        store.record("r", Call((1, number), (3,), (-0.1,), request_id=request_id))
    rewarded = [replace(call, reward=float(number)) for number, call in enumerate(store.calls("r"))]
    store.add_scores(["r"], [1.0], calls=[rewarded])
    assert [call.reward for call in store.calls("r")] == [0, 1, 2, 3]


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


def test_another_process_that_made_the_file_first_is_no_error(tmp_path, monkeypatch):
    first = schema._create

    def slow(connection, path):
        monkeypatch.setattr(schema, "_create", first)
        Store(path).close()
        first(connection, path)

    monkeypatch.setattr(schema, "_create", slow)
    with Store(tmp_path / "run.sqlite") as store:
        assert store.rollouts() == ()
