"""The classic agent inside a rollout: its responses are recorded calls, and what they say becomes actions."""

import asyncio
import json

import pytest
from http_server import serving
from search_environment import Search
from starlette.responses import JSONResponse
from starlette.routing import Route

import art_core as art
from art_classic.agent import Agent, ModelCallError
from art_core.attribution import inside_rollout
from art_core.errors import UpstreamError
from art_core.testing import CountingLearner, FakeEngine
from art_core.types import RolloutAddress


def said(text, **message):
    return {"choices": [{"message": {"role": "assistant", "content": text, **message}}]}


def run_of(tmp_path, **settings):
    return art.open_run(tmp_path / "run", **{"engine": FakeEngine(), "learner": CountingLearner(), **settings})


async def test_every_response_inside_a_rollout_is_a_recorded_call(tmp_path):
    engine = FakeEngine(['{"type": "search", "query": "x"}', '{"type": "select"}'])
    environment, agent, actions = Search(), Agent("Qwen/Qwen2.5-7B-Instruct"), []
    async with run_of(tmp_path, engine=engine) as run, run.rollout("t") as rollout:
        state, done = await environment.reset(), False
        while not done:
            actions.append(await agent.select_action(state))
            state, _, done, _ = await environment.step(actions[-1])
    assert actions == [{"type": "search", "query": "x"}, {"type": "select"}]
    assert len(rollout.trajectory.calls) == 2 and rollout.trajectory.error is None
    shown = rollout.trajectory.calls[1].request["messages"][0]["content"]
    assert '"search_results": ["a", "b"]' in shown


async def test_an_agent_is_run_by_collect_like_any_other(tmp_path):
    agent = Agent("tiny")

    async def episode(task):
        return await agent.generate_response(task, max_tokens=7, temperature=0.2)

    engine = FakeEngine("yes")
    async with run_of(tmp_path, engine=engine) as run:
        (group,) = await run.collect(episode, ["q"], group_size=2)
    assert [t.output for t in group.trajectories] == ["yes", "yes"]
    assert [len(t.calls) for t in group.trajectories] == [1, 1]
    assert engine.requests[0]["max_tokens"] == 7 and engine.requests[0]["temperature"] == 1.0


async def test_a_refused_call_fails_its_run_and_not_the_others(tmp_path):
    def reply(request):
        if "long" in request["messages"][0]["content"]:
            raise UpstreamError("too long", status=400, code="context_length_exceeded")
        return "short"

    agent, errors = Agent("tiny"), []

    async def episode(task):
        try:
            return await agent.generate_response(task)
        except ModelCallError as error:
            errors.append(error)
            raise

    async with run_of(tmp_path, engine=FakeEngine(reply)) as run:
        groups = await run.collect(episode, ["long", "other"], group_size=1)
    assert [t.output for g in groups for t in g.trajectories] == [None, "short"]
    assert "too long" in groups[0].trajectories[0].error
    assert (errors[0].status, errors[0].code) == (400, "context_length_exceeded")


async def test_responses_of_one_agent_do_not_wait_for_each_other(tmp_path):
    class Together(FakeEngine):
        waiting, all_there = 0, None

        async def chat(self, request):
            self.all_there = self.all_there or asyncio.Event()
            self.waiting += 1
            if self.waiting == 4:
                self.all_there.set()
            await self.all_there.wait()
            return await super().chat(request)

    agent = Agent("tiny")
    async with run_of(tmp_path, engine=Together()) as run:
        (group,) = await run.collect(agent.generate_response, ["q"], group_size=4)
    assert [t.output for t in group.trajectories] == ["ok"] * 4


async def test_a_call_that_is_passed_through_is_not_recorded(tmp_path):
    agent = Agent("helper", engine=FakeEngine("from the helper"))
    async with run_of(tmp_path, passthrough=["helper"]) as run, run.rollout("t") as rollout:
        assert await agent.generate_response("hi") == "from the helper"
        assert await Agent("tiny").generate_response("hi") == "ok"
    assert len(rollout.trajectory.calls) == 1


def answering(*answers):
    """Return a route that gives these answers in turn, and the requests that it was sent."""
    requests, left = [], list(answers)

    async def answer(request):
        requests.append((dict(request.headers), await request.json()))
        return left.pop(0)

    return Route("/v1/chat/completions", answer, methods=["POST"]), requests


def address_at(url):
    return RolloutAddress("r", f"{url}/v1", "the-key", "policy")


@pytest.mark.parametrize("pause", ["0", "²".encode().decode("latin-1")], ids=["0", "squared"])
async def test_a_call_is_sent_with_the_rollouts_key_and_again_where_that_may_help(pause):
    refused = JSONResponse({"error": {"message": "full"}}, 503, {"retry-after": pause})
    route, requests = answering(refused, JSONResponse(said("at last")))
    with serving(route) as url, inside_rollout(address_at(url)):
        assert await Agent("tiny").generate_response([{"role": "system", "content": "x"}], stop=["a"]) == "at last"
    (headers, body), (again, _) = requests
    assert headers["authorization"] == "Bearer the-key"
    assert headers["x-art-request-id"] == again["x-art-request-id"]
    assert body == {"model": "policy", "messages": [{"role": "system", "content": "x"}], "stop": ["a"]}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (JSONResponse({"error": {"message": "no such rollout", "code": "gone"}}, 404), "no such rollout"),
        (JSONResponse({"error": "stop"}, 500, {"x-should-retry": "false"}), "status 500"),
        (JSONResponse({"choices": []}), "not a chat completion"),
        (JSONResponse([1]), "status 200"),
    ],
)
async def test_an_answer_that_will_not_change_is_not_asked_for_again(answer, says):
    route, requests = answering(answer)
    with serving(route) as url, inside_rollout(address_at(url)), pytest.raises(ModelCallError, match=says):
        await Agent("tiny").generate_response("hi")
    assert len(requests) == 1


async def test_an_answer_of_thinking_or_a_tool_call_alone_is_an_empty_text():
    route, _ = answering(JSONResponse(said(None, reasoning_content="hm")))
    with serving(route) as url, inside_rollout(address_at(url)):
        assert await Agent("tiny").generate_response("hi") == ""


# actions


@pytest.mark.parametrize(
    ("response", "action"),
    [
        ('{"type": "search", "query": "a {b} c"}', {"type": "search", "query": "a {b} c"}),
        (
            'I think {this}. ```json\n{"type": "go",\n "to": {"type": "x"}}\n``` done',
            {"type": "go", "to": {"type": "x"}},
        ),
        ('{"type": "first"} no: {"type": "second"} {"note": 1}', {"type": "second"}),
        ('{"direction": "left"}', {"direction": "left", "type": "unknown", "error": "the action has no type"}),
        ('{"type": 3}', {"type": "unknown", "error": "the action has no type"}),
    ],
)
async def test_an_action_is_found_in_what_the_model_says(response, action):
    assert await Agent("tiny", engine=FakeEngine(response)).select_action({"step": 0}) == action


@pytest.mark.parametrize(
    "response",
    [
        "",
        "go left",
        '{"type": "go"',
        "{'type': 'go'}",
        '{"type": "go", "to": NaN}',
        '{"to": 1e999}',
        '{"a": "\\ud800"}',
        "{[" * 9000,
    ],
)
async def test_an_answer_without_an_action_is_an_action_that_says_so(response):
    action = await Agent("tiny", engine=FakeEngine(response)).select_action({})
    assert action["type"] == "none" and "no JSON" in action["error"] and action["response"] == response
    json.dumps(action)


async def test_a_state_of_numpy_arrays_is_shown_as_json():
    import numpy as np

    engine = FakeEngine("{}")
    state = {
        "board": np.zeros((1, 2), dtype=int),
        "score": np.int64(3),
        "seen": {1},
        "mean": np.float32(0.5),
        "é": None,
    }
    await Agent("tiny", engine=engine).select_action(state)
    shown = engine.requests[0]["messages"][0]["content"]
    assert '{"board": [[0, 0]], "score": 3, "seen": [1], "mean": 0.5, "é": null}' in shown
