"""The example of a team: its graph, whose calls get which mark, and that every node learns in a minute."""

from __future__ import annotations

import json
from statistics import fmean, stdev
from typing import Any

import pytest

import art_audit

pytest.importorskip("langchain_openai")
pytest.importorskip("transformers")

import art_core as art
from art_core.scoring import advantages
from art_core.testing import FakeEngine
from art_core.types import Group, Trajectory
from examples.email_search.mailbox import open_mailbox
from examples.email_search.tasks import training_tasks
from examples.multi_agent.agent import MAX_SEARCHES, build_agent
from examples.multi_agent.reward import one_for_all, per_node
from examples.multi_agent.train import run

TASK = training_tasks(1)[0]
RIGHT = TASK["message_id"]
FACT = next(it for it in open_mailbox(TASK["input"]["mailbox"]).facts if it.message_id == RIGHT)
SUBJECT = [FACT.project, FACT.kind]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")


async def team(
    tmp_path, reward, *, keywords: list[list[str]], read: object = RIGHT, answer: str = "", call_id: str = "c"
) -> Trajectory:
    """Return the scored run of a team that says these things."""
    searches = iter(keywords)

    def reply(request: dict[str, Any]) -> dict[str, Any]:
        name = request["tool_choice"]["function"]["name"]
        arguments = {"read_email": {"id": read}, "return_final_answer": {"answer": answer}}.get(name)
        text = json.dumps({"keywords": next(searches)} if arguments is None else arguments)
        return {"tool_calls": [{"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}]}

    report = await art.evaluate(
        build_agent(), [TASK], model="tiny", reward=reward, engine=FakeEngine(reply), run_dir=tmp_path / "run",
        progress=False,
    )  # fmt: skip
    return report.trajectories[0]


def marks(trajectory: Trajectory) -> list[tuple[str | None, float | None]]:
    return [(call.agent, call.reward) for call in trajectory.calls]


async def test_every_node_that_does_right_is_marked_for_its_own_part(tmp_path):
    done = await team(tmp_path, per_node, keywords=[SUBJECT], answer=TASK["answer"])
    assert marks(done) == [("searcher", 1), ("reader", 1), ("writer", 1)]
    assert done.reward == 0 and done.metrics == {"found": 1, "read": 1, "success": 1}


async def test_a_search_without_results_is_made_again_and_each_search_has_its_own_mark(tmp_path):
    done = await team(tmp_path, per_node, keywords=[["nothing"], SUBJECT], answer="wrong")
    assert marks(done) == [("searcher", 0), ("searcher", 1), ("reader", 1), ("writer", 0)]
    assert MAX_SEARCHES == 2 and done.metrics["success"] == 0


async def test_a_node_that_had_no_chance_is_neither_praised_nor_blamed(tmp_path):
    lost = await team(tmp_path / "a", per_node, keywords=[["nothing"]] * 2, read=0, answer="?")
    assert marks(lost) == [("searcher", 0), ("searcher", 0), ("reader", None), ("writer", None)]
    unread = await team(tmp_path / "b", per_node, keywords=[SUBJECT], read=0, answer="?")
    assert marks(unread) == [("searcher", 1), ("reader", 0), ("writer", None)]
    group = advantages(Group(TASK, (lost, unread)))
    assert group.call_advantages[0][2:] == (0, 0) and group.call_advantages[1][2] == 0
    assert group.call_advantages[0][0] < 0 < group.call_advantages[1][0]


@pytest.mark.parametrize("read", [0, int(f"{RIGHT}1"), None], ids=["another", "a longer number", "none"])
async def test_another_message_is_not_the_right_one_whatever_its_call_is_named(tmp_path, read):
    done = await team(tmp_path, per_node, keywords=[SUBJECT], read=read, answer="?", call_id=f"call_{RIGHT}")
    assert marks(done) == [("searcher", 1), ("reader", 0), ("writer", None)]


async def test_one_reward_for_all_has_the_same_information_and_no_marks(tmp_path):
    done = await team(tmp_path, one_for_all, keywords=[SUBJECT], answer="wrong")
    assert done.reward == pytest.approx(2 / 3)
    assert {call.reward for call in done.calls} == {None}


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_a_minute_of_training_by_node_raises_what_the_nodes_do_right(tmp_path):
    result = run("node", steps=8, eval_tasks=100, run_dir=tmp_path / "run", progress=False, learning_rate=1.5e-3)
    before, after = (
        [sum(t.metrics[name] for name in ("found", "read", "success")) for t in report.trajectories]
        for report in (result.before, result.after)
    )
    noise = ((stdev(before) ** 2 + stdev(after) ** 2) / len(before)) ** 0.5
    assert fmean(after) - fmean(before) > 3 * noise, (fmean(before), fmean(after), noise)
    assert art_audit.audit(tmp_path / "run").clean
    marked = {
        call.agent for t in art.load_trajectories(tmp_path / "run") for call in t.calls if call.reward is not None
    }
    assert marked == {"searcher", "reader", "writer"}
