"""A candidate beside the provider: which conversations it answers, what happens when it fails, and when its share changes."""

import asyncio
import contextlib
import random
from collections import deque

import anthropic
import openai
import pytest

import art_core as art
from art_core.capture import HttpUpstream
from art_core.errors import ConfigError
from art_core.plugin_api import Plugins
from art_gateway import dialects
from art_gateway.canary import gateway
from art_gateway.canary.gateway import CanaryGateway
from art_gateway.canary.routes import Candidate
from art_gateway.canary.trial import Rule
from art_gateway.local import Link, LocalUpstream
from art_gateway.text import TextUpstream


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture
def canary(start, provider, upstream):
    """``async with canary(share) as desk``: the provider, with ``upstream``, which echoes the request, as the candidate."""

    def canary(share, rule=None, successor=None, **options):
        mine = HttpUpstream(upstream.url, timeout=60.0)
        patience = options.pop("patience", 60.0)
        candidate = Candidate("mine", mine, share, rule=rule, patience=patience, successor=successor)
        return start(
            upstreams=[TextUpstream(provider.base_url)], dialects=dialects(), kind=CanaryGateway, candidate=candidate, **options
        )  # fmt: skip

    return canary


async def say(desk, text, *, path="", before=(), **settings):
    """Return (status, answer, conversation)."""
    body = {"model": "gpt-x", "messages": [*before, user(text)], **settings}
    async with desk.client.post(f"{desk.url}{path}/v1/chat/completions", json=body) as response:
        answer = await (response.text() if settings.get("stream") else response.json())
        return response.status, answer, response.headers.get("x-art-conversation")


def said(answer):
    return answer["choices"][0]["message"]["content"]


async def test_the_share_decides_who_answers_and_both_are_recorded(canary, tmp_path):
    async with canary(0.5) as desk:
        for number in range(40):
            status, _, conversation = await say(desk, f"Please do task-{number:03}.")
            assert status == 200 and conversation
        splits = {rollout.rollout_id: rollout.split for rollout in desk.store.rollouts()}
    mine, live = art.load_trajectories(tmp_path, split="mine"), art.load_trajectories(tmp_path, split="live")
    assert 8 <= len(mine) <= 32 and len(mine) + len(live) == 40 == len(splits)
    assert all(run.calls[0].prompt_ids and run.calls[0].response["content"].startswith("Please") for run in mine)
    assert all(not run.calls[0].prompt_ids and run.calls[0].response["content"].startswith("answer") for run in live)


@pytest.mark.parametrize(("share", "answered"), [(0.0, "answer to task-001"), (1.0, "Please do task-001.")])
async def test_clients_of_every_dialect_are_answered_by_either(canary, share, answered):
    def talk(url):
        messages = [user("Please do task-001.")]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="k") as client:
            yield client.chat.completions.create(model="m", messages=messages).choices[0].message.content
            chunks = client.chat.completions.create(model="m", messages=messages, stream=True)
            yield "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            yield client.responses.create(model="m", input="Please do task-001.").output_text
        with anthropic.Anthropic(base_url=url, api_key="k") as client:
            yield client.messages.create(model="m", max_tokens=99, messages=messages).content[0].text

    async with canary(share) as desk:
        assert await asyncio.to_thread(lambda: list(talk(desk.url))) == [answered] * 4


async def test_a_conversation_stays_where_it_began(canary):
    async with canary(1.0) as desk:
        _, answer, first = await say(desk, "Please do task-001.")
        desk.gateway.routes.change(0.001, "less")
        before = [user("Please do task-001."), {"role": "assistant", "content": said(answer)}]
        _, answer, second = await say(desk, "And task-002?", before=before)
        assert first == second and said(answer) == "And task-002?"
        assert said((await say(desk, "Please do task-003."))[1]) == "answer to task-003"


async def test_without_a_share_the_candidate_answers_nothing_more_even_of_its_conversations(canary):
    async with canary(1.0) as desk:
        assert said((await say(desk, "Please do task-001.", path="/rollouts/a"))[1]) == "Please do task-001."
        status, _ = await desk.order("POST", "/routes", {"share": 0})
        assert status == 200
        assert said((await say(desk, "Please do task-002.", path="/rollouts/a"))[1]) == "answer to task-002"
        [rollout] = desk.store.rollouts()
        assert rollout.split == "mine" and len(desk.of("a")) == 2


@pytest.mark.parametrize("fault", [500, 429, "reset", "half", "not json", "no ids", "hang"])
@pytest.mark.parametrize("stream", [False, True])
async def test_whatever_befalls_the_candidate_the_provider_answers(canary, upstream, fault, stream):
    upstream.faults.append(fault)
    async with canary(1.0, patience=0.3) as desk:
        status, answer, _ = await say(desk, "Please do task-001.", path="/rollouts/a", stream=stream)
        assert status == 200
        if (fault, stream) == ("half", True):  # what the client has can't be taken back
            assert "error" in answer
        else:
            assert "task-001" in answer if stream else said(answer) == "answer to task-001"
        assert desk.gateway.routes.trial.all.failures.mean == 1.0
        assert [call.finish_reason for call in desk.of("a") if not call.prompt_ids] == ["stop"] * (
            (fault, stream) != ("half", True)
        )


async def test_calls_that_fail_together_because_the_candidate_is_down_are_one_failure(canary, upstream):
    upstream.faults.extend(["hang"] * 5)
    async with canary(1.0, patience=0.3) as desk:
        said_ = await asyncio.gather(
            *(say(desk, "Please do task-001.", path=f"/rollouts/{number}") for number in range(5))
        )
        assert [said(answer) for _, answer, _ in said_] == ["answer to task-001"] * 5
        trial = desk.gateway.routes.trial
        assert (trial.all.failures.count, trial.missed) == (1, 5)


async def test_what_the_candidate_cannot_read_the_provider_answers(start, upstream, another_upstream):
    async with another_upstream() as live:
        candidate = Candidate("mine", HttpUpstream(upstream.url), 1.0)
        async with start(upstreams=[TextUpstream(live.url)], kind=CanaryGateway, candidate=candidate) as desk:
            status, answer, _ = await say(desk, "Please do task-001.", temperature="warm")
            trial = desk.gateway.routes.trial
        assert (status, said(answer), len(live.requests)) == (200, "Please do task-001.", 1)
        assert (trial.all.failures.count, trial.missed) == (0, 1)


async def test_nothing_is_asked_or_changed_without_the_gateways_key(canary, upstream):
    async with canary(1.0, api_key="ours") as desk:
        assert (await say(desk, "Please do task-001.", path="/rollouts/a"))[0] == 401
        for method, path, body in (
            ("GET", "/routes", None),
            ("POST", "/routes", {"share": 0}),
            ("POST", "/feedback", {}),
        ):
            assert (await desk.order(method, path, body))[0] == 401
        assert not upstream.requests and desk.gateway.routes.share == 1


async def test_what_both_refuse_is_not_the_candidates_failure(canary, upstream):
    upstream.faults.append(500)
    async with canary(1.0) as desk:
        status, _, _ = await say(desk, "Please do refused-000.")
        assert status == 400 and desk.gateway.routes.trial.all.failures.count == 0


async def test_a_candidate_that_is_down_is_left_alone_for_a_while(canary, upstream):
    async with canary(1.0) as desk:
        await upstream.stop()
        for number in range(20):
            assert said((await say(desk, f"Please do task-{number:03}."))[1]) == f"answer to task-{number:03}"
        assert desk.gateway.routes.trial.all.failures.count < 5


async def test_feedback_scores_a_conversation_by_the_name_in_its_answers_header(canary):
    async with canary(1.0) as desk:
        _, _, conversation = await say(desk, "Please do task-001.")
        feedback = {"conversation": conversation, "score": 0.25, "metrics": {"thumbs": 1}}
        assert (await desk.order("POST", "/feedback", feedback))[0] == 200
        [score] = desk.store.scores(conversation)
        assert (score.reward, score.metrics, score.by) == (0.25, {"thumbs": 1}, "feedback")
        for wrong in ({"conversation": conversation, "score": 2}, {"score": 1}, {"conversation": 1, "score": 1}, []):
            assert (await desk.order("POST", "/feedback", wrong))[0] == 400
        assert (await desk.order("POST", "/feedback", {"conversation": "unknown", "score": 1}))[0] == 404


async def converse(desk, count, *, quality, name):
    """Let ``count`` new conversations be answered and scored; ``quality``: mean score of each side."""
    for number in range(count):
        conversation = f"{name}-{number}"
        assert (await say(desk, "Please do task-001.", path=f"/rollouts/{conversation}"))[0] == 200
        score = float(random.Random(conversation).random() < quality[desk.gateway.routes.answerer(conversation)])
        assert (await desk.order("POST", "/feedback", {"conversation": conversation, "score": score}))[0] == 200
        if not number % 20:
            await desk.gateway.routes.update()


RULE = Rule(ramp=(0.5, 0.8), margin=0.3, failures=0.2, block=50)


async def test_a_candidate_that_is_as_good_gets_a_larger_share_and_one_that_turned_bad_none(canary, tmp_path):
    async with canary(0.5, RULE) as desk:
        await converse(desk, 500, quality={"mine": 0.8, "live": 0.8}, name="good")
        assert desk.gateway.routes.share == 0.8
        await converse(desk, 300, quality={"mine": 0.2, "live": 0.8}, name="bad")
        assert desk.gateway.routes.share == 0
        _, found = await desk.order("GET", "/routes")
        assert [round(it["share"], 2) for it in found["history"]] == [0.5, 0.8, 0.0]
        assert (
            "lower by less than" in found["history"][1]["why"] and "its scores are lower" in found["history"][2]["why"]
        )
    async with canary(0.5, RULE) as desk:
        assert desk.gateway.routes.share == 0
        assert said((await say(desk, "Please do task-003."))[1]) == "answer to task-003"


async def test_a_candidate_that_often_fails_loses_its_share(canary, upstream):
    async with canary(1.0, RULE) as desk:
        for number in range(60):
            upstream.faults.append(500)
            assert (await say(desk, f"Please do task-{number:03}."))[0] == 200
        assert (
            desk.gateway.routes.share == 0
            and "of its calls fail" in desk.gateway.routes.as_json()["history"][-1]["why"]
        )


async def test_a_restart_continues_the_trial(canary, upstream):
    async with canary(0.5, Rule((0.5,))) as desk:
        await converse(desk, 30, quality={"mine": 1, "live": 0.5}, name="a")
        upstream.faults.extend([500] * 3)
        await converse(desk, 20, quality={"mine": 1, "live": 0.5}, name="b")
        await desk.gateway.routes.update()
        before = desk.gateway.routes.trial.as_json()
        sides = {f"a-{number}": desk.gateway.routes.answerer(f"a-{number}") for number in range(30)}
    async with canary(0.1, Rule((0.5,))) as desk:
        await desk.gateway.routes.update()
        after = desk.gateway.routes.trial.as_json()
        assert desk.gateway.routes.share == 0.5
        assert {name: desk.gateway.routes.answerer(name) for name in sides} == sides
    assert after["scores"] == before["scores"]
    for evidence in ("all", "newest"):
        assert after[evidence]["difference"] == before[evidence]["difference"]
        counted = [it[evidence]["failures"] for it in (before, after)]
        assert [counted[1][name] for name in ("count", "mean")] == [counted[0][name] for name in ("count", "mean")]


async def test_a_candidate_under_another_name_starts_anew(start, provider, upstream):
    def canary(name):
        candidate = Candidate(name, HttpUpstream(upstream.url), 0.25)
        upstreams = [TextUpstream(provider.base_url)]
        return start(upstreams=upstreams, dialects=dialects(), kind=CanaryGateway, candidate=candidate)

    async with canary("first") as desk:
        desk.gateway.routes.change(0.0, "bad")
    async with canary("second") as desk:
        assert desk.gateway.routes.share == 0.25


class Watched(HttpUpstream):
    """Notes when it is stopped; ``refuses`` to start."""

    def __init__(self, url, *, refuses=False):
        super().__init__(url)
        self.refuses, self.stopped = refuses, asyncio.Event()

    async def start(self):
        if self.refuses:
            raise RuntimeError("out of memory")

    async def stop(self):
        self.stopped.set()
        await super().stop()


def from_queue(waiting):
    return lambda _: waiting.popleft() if waiting else None


@pytest.fixture
def impatient(monkeypatch):
    """A gateway that looks for a successor all the time."""
    monkeypatch.setattr(gateway, "FOLLOW_SECONDS", 0.01)
    monkeypatch.setattr(gateway, "RETRY_SECONDS", 0.01)


@contextlib.asynccontextmanager
async def following(desk):
    task = asyncio.gather(*desk.gateway.chores())
    yield
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_successor_begins_at_the_first_share_and_calls_in_flight_end_where_they_began(
    canary, upstream, another_upstream, until, impatient
):
    waiting, first = deque(), Watched(upstream.url)
    async with (
        another_upstream() as newer,
        canary(0.9, successor=from_queue(waiting)) as desk,
    ):
        await desk.gateway._replace(first)
        desk.gateway.routes.change(1.0, "it is good")
        async with following(desk):
            await say(desk, "Please do task-000.", path="/rollouts/before")
            upstream.may_answer.clear()
            asked = asyncio.create_task(say(desk, "Please do task-001.", path="/rollouts/a"))
            await until(lambda: upstream.open)
            refusing = Watched(newer.url, refuses=True)
            waiting.extend([refusing, HttpUpstream(newer.url)])
            await until(lambda: desk.gateway.routes.share == 0.9)
            newest = desk.gateway.routes.as_json()["history"][-1]
            assert newest["candidate"] == f"mine {newer.url}" and newest["why"] == "it is new"
            assert refusing.stopped.is_set() and not first.stopped.is_set()
            for number in range(20):
                status, answer, _ = await say(desk, f"Please do task-{number:03}.", path=f"/rollouts/{number}")
                assert status == 200
            assert len(newer.requests) >= 10 and len(upstream.requests) == 2
            calls = newest["calls"]
            upstream.may_answer.set()
            status, answer, _ = await asked
            assert (status, said(answer)) == (200, "Please do task-001.")
            await asyncio.wait_for(first.stopped.wait(), 60)
            assert newest["calls"] == calls == len(newer.requests), "the old one's calls don't count for the new one"
            _, answer, _ = await say(desk, "Please do task-002.", path="/rollouts/before")
            assert said(answer) == "answer to task-002", "the provider continues what the old one began"


async def test_failures_of_the_one_that_was_replaced_are_not_held_against_its_successor(
    canary, upstream, another_upstream, until, impatient
):
    waiting, rule = deque(), Rule((0.5, 0.75))
    async with (
        another_upstream() as newer,
        canary(0.5, rule=rule, successor=from_queue(waiting)) as desk,
    ):
        desk.gateway.routes.change(1.0, "it is good")
        async with following(desk):
            upstream.may_answer.clear()
            asked = [asyncio.create_task(say(desk, "Please do task-001.", path=f"/rollouts/{n}")) for n in range(10)]
            await until(lambda: upstream.open == 10)
            waiting.append(HttpUpstream(newer.url))
            await until(lambda: desk.gateway.routes.share == 0.5)
            await upstream.stop()
            upstream.may_answer.set()
            assert [said(answer) for _, answer, _ in await asyncio.gather(*asked)] == ["answer to task-001"] * 10
            newest = desk.gateway.routes.as_json()["history"][-1]
            assert (newest["share"], newest["calls"], newest["failures"], newest["missed"]) == (0.5, 0, 0, 0)


async def test_a_share_that_a_person_took_away_stays_away(canary, upstream, another_upstream, until, impatient):
    waiting = deque()
    async with (
        another_upstream() as newer,
        canary(0.9, successor=from_queue(waiting)) as desk,
    ):
        await desk.order("POST", "/routes", {"share": 0, "why": "it is rude"})
        async with following(desk):
            waiting.append(HttpUpstream(newer.url))
            await until(lambda: len(desk.gateway.routes.as_json()["history"]) == 3)
            newest = desk.gateway.routes.as_json()["history"][-1]
            assert (newest["share"], newest["why"]) == (0.0, "it is new, and a person set 0%")


def test_a_link_has_a_successor_while_it_leads_elsewhere(tmp_path):
    link = tmp_path / "current"
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    link.symlink_to("one")
    successor = Link(link, Plugins())
    served = LocalUpstream(str(link), Plugins())
    assert served.base_url.endswith("/one") and successor(served) is None
    link.unlink()
    link.symlink_to("other")
    newer = successor(served)
    assert newer.base_url.endswith("/other") and successor(newer) is None and successor(served) is not None
    link.unlink()
    assert successor(newer) is None, "art retrain removes it if no accepted round is left"
    link.symlink_to("nowhere")
    with pytest.raises(ConfigError):
        successor(newer)
