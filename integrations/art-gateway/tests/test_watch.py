"""``art watch``: what a gateway records is scored beside it."""

import asyncio
import textwrap

import pytest
import typer
from typer.testing import CliRunner

import art_gateway
from art_core.capture import HttpUpstream
from art_gateway import asking
from art_gateway.canary.gateway import CanaryGateway
from art_gateway.canary.routes import Candidate
from art_gateway.text import TextUpstream
from art_gateway.text_gateway import TextGateway
from art_gateway.watch import Wanted, Watch

JUDGE = """
seen = []

def judge(conversation):
    seen.append(conversation)
    conversation.metrics["success"] = float(conversation.output.startswith("answer"))
    return 1.0 if conversation.output.startswith("answer") else 0.25

def broken(conversation):
    raise ValueError("no idea")
"""


@pytest.fixture
def watch(tmp_path):
    """``await watch(url, *options)``: the output of ``art watch --once``, and its exit code."""
    (tmp_path / "judge.py").write_text(textwrap.dedent(JUDGE))
    app = typer.Typer()
    art_gateway.register_commands(app)

    async def watch(url, *options, reward="judge"):
        where = ["watch", str(tmp_path), "--reward", f"{tmp_path}/judge.py:{reward}", "--gateway", url]
        arguments = [*where, "--quiet", "0", "--once", *options]
        result = await asyncio.to_thread(CliRunner().invoke, app, arguments, env={"COLUMNS": "300"})
        return " ".join(result.output.split()), result

    return watch


@pytest.fixture
def desk(start, provider, upstream):
    """A provider, which says "answer to task-...", beside a candidate, which says what it was asked."""
    candidate = Candidate("mine", HttpUpstream(upstream.url), 0.5)
    return start(upstreams=[TextUpstream(provider.base_url)], kind=CanaryGateway, candidate=candidate)


async def talk(desk, conversation, content="Please do task-001."):
    body = {"model": "gpt-x", "messages": [{"role": "user", "content": content}]}
    address = f"{desk.url}/rollouts/{conversation}/v1/chat/completions"
    async with desk.client.post(address, json=body) as response:
        assert response.status == 200, await response.text()


async def test_both_sides_are_scored_and_the_scores_reach_the_comparison(desk, watch):
    async with desk as desk:
        for number in range(12):
            await talk(desk, f"c{number}")
        said, _ = await watch(desk.url)
        await desk.gateway.routes.update()
        scores = desk.gateway.routes.as_json()["trial"]["scores"]
        splits = {run.rollout_id: run.split for run in desk.store.rollouts()}
        stored = {id: desk.store.scores(id) for id in splits}
    assert scores["live"]["mean"] == 1 and scores["candidate"]["mean"] == 0.25
    assert scores["live"]["count"] + scores["candidate"]["count"] == 12
    assert f"live 1.000 ({scores['live']['count']} scored), mine 0.250 ({scores['candidate']['count']} scored)" in said
    for id, split in splits.items():
        [score] = stored[id]
        assert score.by == "judge" and score.metrics == {"success": float(split == "live")}


async def test_a_judge_sees_what_was_asked_and_answered(start, provider, watch, tmp_path):
    (tmp_path / "judge.py").write_text(
        "def judge(it):\n"
        "    assert it.task == {'input': 'Please do\\ntask-001.'} and it.output == 'answer to task-001', it\n"
        "    assert [message['role'] for message in it.calls[-1].messages()] == ['user', 'assistant']\n"
        "    return 0.5"
    )
    async with start(upstreams=[TextUpstream(provider.base_url)], kind=TextGateway) as desk:
        await talk(desk, "c0", [{"type": "text", "text": text} for text in ("Please do", "task-001.")])
        said, _ = await watch(desk.url)
    assert "0.500 (1 scored)" in said and "could not be scored" not in said


async def test_what_users_have_scored_and_what_is_still_going_on_is_left_alone(desk, watch):
    async with desk as desk:
        await talk(desk, "scored")
        await desk.order("POST", "/feedback", {"conversation": "scored", "score": 1})
        assert "no conversation has been scored" in (await watch(desk.url))[0]
        await talk(desk, "new")
        assert "no conversation has been scored" in (await watch(desk.url, "--quiet", "60"))[0]
        assert "no conversation has been scored" in (await watch(desk.url, "--hours", "0"))[0]
        assert "(1 scored)" in (await watch(desk.url))[0]
        assert "no conversation has been scored" in (await watch(desk.url))[0]


async def test_a_share_of_the_conversations_is_scored_the_same_after_a_restart(desk, watch):
    async with desk as desk:
        for number in range(40):
            await talk(desk, f"c{number}")
        await watch(desk.url, "--share", "25%")
        scored = [run.rollout_id for run in desk.store.rollouts() if desk.store.scores(run.rollout_id)]
        assert 2 <= len(scored) <= 20
        assert "no conversation has been scored" in (await watch(desk.url, "--share", "25%"))[0]
        await watch(desk.url, "--share", "100%")
        assert all(desk.store.scores(run.rollout_id) for run in desk.store.rollouts())


async def test_a_judge_that_fails_is_quoted_and_tried_again_later(desk, watch):
    async with desk as desk:
        await talk(desk, "c0")
        said, result = await watch(desk.url, reward="broken")
        assert result.exit_code == 0 and "could not be scored: 1 of " in said and "ValueError: no idea" in said
        assert "(1 scored)" in (await watch(desk.url))[0]


async def test_what_the_gateway_refuses_is_quoted_and_the_others_are_scored(desk, watch, tmp_path):
    (tmp_path / "judge.py").write_text(
        "import numpy as np\n"
        "def judge(it):\n"
        "    it.metrics.update(right=True, unknown=float('nan'))\n"
        "    return 7 if 'task-002' in it.task['input'] else np.float32(0.5)"
    )
    async with desk as desk:
        await talk(desk, "c0")
        await talk(desk, "c1", "Please do task-002.")
        said, result = await watch(desk.url)
        [score] = desk.store.scores("c0")
    assert result.exit_code == 0 and "(1 scored)" in said and "a number from 0 to 1" in said
    assert score.reward == 0.5 and score.metrics == {"right": 1.0}


async def test_a_user_who_was_faster_than_the_judge_counts(desk, watch, tmp_path):
    async with desk as desk:
        await talk(desk, "c0")
        (tmp_path / "judge.py").write_text(
            "import json, urllib.request\n"
            "def judge(it):\n"
            "    body = json.dumps({'conversation': 'c0', 'score': 1}).encode()\n"
            f"    urllib.request.urlopen(urllib.request.Request('{desk.url}/feedback', body))\n"
            "    return 0.0"
        )
        await watch(desk.url)
        assert [score.by for score in desk.store.scores("c0")] == ["feedback"]


async def test_a_harness_that_reports_no_reward_leaves_the_score_to_the_judge(desk, watch):
    async with desk as desk:
        await talk(desk, "c0")
        await desk.order("POST", "/rollouts/c0/finish", {"output": "answer: its own", "metrics": {"seconds": 3}})
        assert "1.000 (1 scored)" in (await watch(desk.url))[0]


async def test_nothing_is_judged_before_the_gateway_has_answered_with_this_key(start, provider, watch):
    async with start(upstreams=[TextUpstream(provider.base_url)], kind=TextGateway, api_key="secret") as desk:
        body = {"model": "m", "messages": [{"role": "user", "content": "Please do task-001."}]}
        key = {"authorization": "Bearer secret"}
        await desk.client.post(f"{desk.url}/rollouts/c0/v1/chat/completions", json=body, headers=key)
        said, result = await watch(desk.url, "--api-key", "wrong")
        assert result.exit_code == 2 and "answers 401" in said and "scored" not in said
        assert "(1 scored)" in (await watch(desk.url, "--api-key", "secret"))[0]
    said, result = await watch("http://127.0.0.1:1")
    assert result.exit_code == 2 and "no gateway answers" in said


async def test_scores_wait_for_a_gateway_that_restarts(desk, watch, tmp_path, monkeypatch):
    monkeypatch.setattr("art_gateway.watch.LOOK_SECONDS", 0.05)
    asked = []

    def ask(url, *rest):
        asked.append(url)
        if len(asked) in (2, 3):
            raise asking.NoAnswer("no gateway answers")
        return answer(url, *rest)

    answer = asking.ask
    monkeypatch.setattr("art_gateway.watch.ask", ask)
    said = []
    async with desk as desk:
        await talk(desk, "c0")
        running = Watch(tmp_path, lambda it: 0.5, Wanted(1.0, 0.0, 60.0), desk.url, None, said.append)
        watching = asyncio.create_task(running.run(once=False))
        async with asyncio.timeout(30):
            while "(1 scored)" not in running.summary():
                await asyncio.sleep(0.02)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        result = await watch(desk.url)
    assert [line for line in said if "scores wait for it" in line] == said[:-1] and len(said) == 2
    assert result[1].exit_code == 0


async def test_a_folder_without_a_recording_and_a_reward_that_is_none_are_refused(watch, tmp_path):
    said, result = await watch("http://127.0.0.1:1")
    assert result.exit_code == 2 and "pass the gateway's --run-dir" in said
    (tmp_path / "run.sqlite").touch()
    assert "isn't a reward" in str((await watch("http://127.0.0.1:1", reward="seen"))[1].exception)
