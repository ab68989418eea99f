"""``art watch``: what a gateway records is scored beside it."""

import asyncio
import textwrap

import pytest
import typer
from typer.testing import CliRunner

import art_gateway
from art_core.capture import HttpUpstream
from art_gateway.canary.gateway import CanaryGateway
from art_gateway.canary.routes import Candidate
from art_gateway.text import TextUpstream
from art_gateway.text_gateway import TextGateway

JUDGE = """
seen = []

def judge(conversation):
    seen.append(conversation)
    conversation.metrics["success"] = float(conversation.output.startswith("answer"))
    return 1.0 if conversation.output.startswith("answer") else 0.25

def broken(conversation):
    raise ValueError("no idea")

def proud(conversation):
    return 7
"""


@pytest.fixture
def watch(tmp_path):
    """``await watch(url, *options)``: the output of ``art watch --once``, and its exit code."""
    (tmp_path / "judge.py").write_text(textwrap.dedent(JUDGE))
    app = typer.Typer()
    art_gateway.register_commands(app)

    async def watch(url, *options, reward="judge", once=True):
        arguments = [
            "watch",
            str(tmp_path),
            "--reward",
            f"{tmp_path}/judge.py:{reward}",
            "--gateway",
            url,
            "--quiet",
            "0",
        ]
        arguments += [*(["--once"] if once else []), *options]
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
    assert f"live 1.000 in {scores['live']['count']}, mine 0.250 in {scores['candidate']['count']}" in said
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
    assert "0.500 in 1" in said and "could not be scored" not in said


async def test_what_users_have_scored_and_what_is_still_going_on_is_left_alone(desk, watch):
    async with desk as desk:
        await talk(desk, "scored")
        await desk.order("POST", "/feedback", {"conversation": "scored", "score": 1})
        assert "no conversation has been scored" in (await watch(desk.url))[0]
        await talk(desk, "new")
        assert "no conversation has been scored" in (await watch(desk.url, "--quiet", "60"))[0]
        assert "no conversation has been scored" in (await watch(desk.url, "--hours", "0"))[0]
        assert "in 1" in (await watch(desk.url))[0]
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
        assert result.exit_code == 0 and "1 could not be scored" in said and "ValueError: no idea" in said
        assert "in 1" in (await watch(desk.url))[0]


async def test_a_score_that_is_none_is_refused_with_what_one_is(desk, watch):
    async with desk as desk:
        await talk(desk, "c0")
        said, result = await watch(desk.url, reward="proud")
    assert result.exit_code == 2 and "a number from 0 to 1" in said


async def test_scores_wait_for_a_gateway_that_restarts(desk, watch, monkeypatch):
    monkeypatch.setattr("art_gateway.watch.LOOK_SECONDS", 0.05)
    asked = []

    def ask(url, *rest):
        asked.append(url)
        if len(asked) < 3:
            raise art_gateway.asking.NoAnswer("no gateway answers")
        return answer(url, *rest)

    answer = art_gateway.asking.ask
    monkeypatch.setattr("art_gateway.watch.ask", ask)
    async with desk as desk:
        await talk(desk, "c0")
        said, _ = await watch(desk.url)
    assert said.count("scores wait for it") == 1 and "in 1" in said


async def test_a_folder_without_a_recording_and_a_reward_that_is_none_are_refused(watch, tmp_path):
    said, result = await watch("http://127.0.0.1:1")
    assert result.exit_code == 2 and "pass the gateway's --run-dir" in said
    (tmp_path / "run.sqlite").touch()
    assert "isn't a reward" in str((await watch("http://127.0.0.1:1", reward="seen"))[1].exception)
