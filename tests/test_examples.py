"""The agents of ``examples/any_agent`` train as they are, on the model that ships with art."""

import json

import pytest

import art_audit

pytest.importorskip("langchain_openai")
pytest.importorskip("transformers")

import art_core as art
from art_core.store import Store
from art_core.store.digest import call_digest
from art_core.types import Call
from examples.any_agent.inbox import reward
from examples.any_agent.train import run

SMALL = {"steps": 1, "eval_tasks": 4, "tasks_per_step": 4, "group_size": 4, "progress": False}
NODES = ("searcher", "reader", "writer")


def runs_of(agent: str, run_dir) -> list[art.Trajectory]:
    """Return the runs that the step trained."""
    run(agent, run_dir=run_dir, **SMALL)
    assert art_audit.audit(run_dir).clean
    return art.load_trajectories(run_dir)


def reading(message_id):
    """A call that reads this message."""
    function = {"name": "read_email", "arguments": json.dumps({"id": message_id})}
    return Call((1,), (2,), (0.0,), response={"tool_calls": [{"function": function}]})


@pytest.mark.parametrize(
    ("calls", "output", "worth"),
    [
        ([], " Oslo ", 1.0),
        ([reading(11), reading(12)], "Oslo", 1.1),
        ([reading(12)], "Lima", 0.1),
        ([reading(11)], "Lima", 0.0),
        ([reading(12)], None, 0.0),
        ([], None, -0.1),
    ],
)
def test_the_reward_is_for_the_answer_and_for_reading_its_message_and_punishes_silence(calls, output, worth):
    trajectory = art.Trajectory({"answer": "Oslo", "message_id": 12}, tuple(calls), output=output)
    assert reward(trajectory) == pytest.approx(worth)
    assert trajectory.metrics == {
        "success": float(worth >= 1),
        "read": float(any(call == reading(12) for call in calls)),
    }


@pytest.mark.engines
def test_a_function_with_the_openai_client_trains(tmp_path):
    runs = runs_of("openai_function", tmp_path / "run")
    assert [t.error for t in runs] == [None] * 16
    assert all(t.calls for t in runs)
    assert {c.agent for t in runs for c in t.calls} == {None}


@pytest.mark.engines
def test_two_nodes_of_a_graph_train_and_the_third_is_frozen(tmp_path):
    runs = runs_of("langgraph_team", tmp_path / "run")
    assert [t.error for t in runs] == [None] * 16
    assert {c.agent for t in runs for c in t.calls} == set(NODES)
    with Store(tmp_path / "run" / "run.sqlite") as store:
        (update,) = store.updates()
    trained_calls = {digest for _, digests in update.trained for digest in digests}
    made = {node: {call_digest(c) for t in runs for c in t.calls if c.agent == node} for node in NODES}
    assert made["searcher"] & trained_calls and made["reader"] & trained_calls
    assert not made["writer"] & trained_calls


@pytest.mark.engines
def test_an_agent_that_hands_over_trains_and_the_forced_handoff_does_not(tmp_path):
    pytest.importorskip("agents")
    runs = runs_of("agents_handoff", tmp_path / "run")
    assert [t.error for t in runs] == [None] * 16
    desk = [t.calls[0] for t in runs]
    assert {call.agent for call in desk} == {"front desk"}
    assert all("transfer_to_inbox" in str(call.response) for call in desk)
    assert all(len(call.forced) > len(call.sampled_ids) / 2 for call in desk)
    assert {c.agent for t in runs for c in t.calls[1:]} == {"inbox"}
