"""Trajectories that are captured are what the model was asked, whoever asked and however."""

import asyncio
import functools
import math

import litellm
import openai
import pytest
import torch
from langchain.agents import create_agent
from langchain_core.tools import tool
from pydantic import BaseModel

import art_openpipe as art
from art_core import open_run
from art_core.errors import CaptureError, ConfigError
from art_core.testing import FakeEngine
from art_openpipe.langgraph import init_chat_model, wrap_rollout
from art_openpipe.trajectories import TokenFlag

ASKED = [{"role": "user", "content": "hello"}]
CALL = {"tool_calls": [{"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Oslo"}'}}]}


@tool
def look(city: str) -> str:
    """Look at a city."""
    return f"rain in {city}"


def said(trajectory):
    return [it.message.content for it in trajectory.choices()]


async def test_the_calls_of_a_coroutine_are_its_trajectory(desk):
    async def rollout():
        await desk.ask("hello")
        trajectory = art.current_trajectory(require=True)
        assert said(trajectory) == ["ok"]  # while it runs
        trajectory.reward = 0.5

    trajectory = await art.trajectory(rollout())
    [exchange] = trajectory.exchanges.chat_completions
    assert exchange.model == "m" and exchange.request["messages"] == ASKED
    assert exchange.response.usage.completion_tokens == len(b"ok</>")
    assert trajectory.messages() == [*ASKED, {"role": "assistant", "content": "ok"}]
    assert trajectory.reward == 0.5 and trajectory.metrics["duration"] > 0
    assert art.current_trajectory() is None
    with pytest.raises(RuntimeError, match=r"art\.trajectory"):
        art.current_trajectory(require=True)
    with pytest.raises(TypeError, match="runs a coroutine"):
        await art.trajectory(asyncio.sleep)


async def test_captured_trajectories_are_trained_even_after_they_were_stored_as_json(desk):
    group = await art.trajectory_group(art.trajectory(desk.ask("hello")) for _ in range(2))
    group.trajectories[0].reward = 1.0
    stored = art.TrajectoryGroup.model_validate_json(group.model_dump_json())
    result = await desk.backend.train(desk.model, [stored])
    assert [len(calls) for calls in desk.trained()] == [1, 1] and result.metrics["train/reward"] == 0.5
    assert {call.agent for calls in desk.trained() for call in calls} == {None}
    [task] = {str(it.task["input"]) for it in desk.run.store.trajectories(split="train")}
    assert task == str(ASKED)


async def test_blocks_capture_what_is_asked_in_them_and_not_in_blocks_inside(desk):
    with art.Trajectory() as outer:
        await desk.ask("one")
        with art.Trajectory() as inner:
            await desk.ask("two")
        with art.no_capture():
            assert art.current_trajectory() is None
            await desk.ask("three")
            with art.Trajectory() as another:
                await desk.ask("four")
        await desk.ask("five")
    asked = [
        [it.request["messages"][0]["content"] for it in each.exchanges.chat_completions]
        for each in (outer, inner, another)
    ]
    assert asked == [["one", "five"], ["two"], ["four"]]
    with pytest.raises(ValueError, match="2 histories"):
        outer.messages()
    with outer:
        await desk.ask("six")
    assert len(outer.exchanges.chat_completions) == 3


async def test_a_trajectory_whose_messages_the_script_builds_has_no_exchanges(desk):
    with art.Trajectory(messages_and_choices=[]) as trajectory:
        await desk.ask("hello", trajectory)
    assert not trajectory.exchanges and said(trajectory) == ["ok"]
    exchanges = (await art.trajectory(desk.ask("x"))).exchanges
    with pytest.raises(ValueError, match="either exchanges or messages_and_choices"):
        art.Trajectory(exchanges=exchanges, messages_and_choices=ASKED)


@pytest.mark.parametrize("content", [None, "", "left out"])
async def test_a_loop_with_tools_is_one_conversation_however_empty_content_is_written(make_desk, content):
    desk = await make_desk([CALL, "rain"])

    async def rollout():
        client = desk.model.openai_client()
        completion = await client.chat.completions.create(model="m", messages=ASKED)
        answer = completion.choices[0].message.model_dump(exclude_none=True) | {"content": content}
        if content == "left out":
            del answer["content"]
        messages = [*ASKED, answer, {"role": "tool", "tool_call_id": "t1", "content": "rain"}]
        await client.chat.completions.create(model="m", messages=messages)

    trajectory = await art.trajectory(rollout())
    assert said(trajectory) == [None, "rain"] and len(trajectory.histories()) == 1
    history = trajectory.chat_completions_history(model="m*")
    assert history.model == "m" and [it["role"] for it in history.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


async def test_several_choices_threads_streams_and_litellm_are_all_there(make_desk):
    desk = await make_desk(["a", "b", "c", "threaded", "option", "streamed", "lite"])

    def blocking():
        with openai.OpenAI(base_url=desk.model.inference_base_url, api_key="k") as client:
            client.chat.completions.create(model="m", messages=ASKED)

    async def rollout():
        client = desk.model.openai_client()
        await client.chat.completions.create(model="m", messages=ASKED, n=3)
        await asyncio.get_running_loop().run_in_executor(None, blocking)
        client = client.with_options(max_retries=1)
        await client.chat.completions.create(model="m", messages=ASKED)
        async for _ in await client.chat.completions.create(model="m", messages=ASKED, stream=True):
            pass
        await litellm.acompletion(messages=ASKED, **desk.model.litellm_completion_params())

    trajectory = await art.trajectory(rollout())
    assert said(trajectory) == ["a", "b", "c", "threaded", "option", "streamed", "lite"]


async def test_another_models_answers_are_in_the_trajectory_and_never_trained(desk, tmp_path):
    async with open_run(tmp_path / "judge", engine=FakeEngine("judged")) as somebody_elses:
        address = {"inference_base_url": await somebody_elses.serving.open("judge"), "inference_api_key": "k"}
        judge = art.Model(name="judge", project="p", **address)

        async def rollout():
            await desk.ask("hello")
            await judge.openai_client().chat.completions.create(model="judge", messages=ASKED)

        trajectories = [await art.trajectory(rollout()) for _ in range(2)]
        await judge.aclose()
    assert sorted(said(trajectories[0])) == ["judged", "ok"]
    assert [it.model for it in trajectories[0].histories(model="j*")] == ["judge"]
    trajectories[0].reward = 1.0
    await desk.backend.train(desk.model, [art.TrajectoryGroup(trajectories)])
    assert [[bytes(call.sampled_ids) for call in calls] for calls in desk.trained()] == [[b"ok</>"]] * 2


async def test_two_models_are_captured_together_and_trained_each_with_its_own_calls(make_desk):
    desk, other = await make_desk("mine"), await make_desk("yours", name="other")

    async def rollout():
        await desk.ask("hello")
        await other.ask("hello")

    trajectories = [await art.trajectory(rollout()) for _ in range(2)]
    trajectories[0].reward = 1.0
    for trained, answer in ((desk, b"mine</>"), (other, b"yours</>")):
        await trained.backend.train(trained.model, [art.TrajectoryGroup(trajectories)])
        assert [[bytes(call.sampled_ids) for call in calls] for calls in trained.trained()] == [[answer]] * 2


async def test_a_rollout_that_closes_its_backend_keeps_its_own_error(desk):
    async def rollout():
        await desk.ask("hello")
        await desk.backend.close()
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await art.trajectory(rollout())


async def test_concurrent_captures_do_not_mix(make_desk):
    desk = await make_desk(lambda request: request["messages"][-1]["content"].upper())

    async def rollout(number):
        await asyncio.gather(*(desk.ask(f"{number}-{part}") for part in "ab"))

    found = await asyncio.gather(*(art.trajectory(rollout(number)) for number in range(8)))
    assert [sorted(said(it)) for it in found] == [[f"{number}-A", f"{number}-B"] for number in range(8)]
    assert all(len(it.histories()) == 2 for it in found)


async def test_blocks_must_end_in_the_reverse_order_of_their_begins():
    one, two = art.Trajectory(), art.Trajectory()
    with pytest.raises(RuntimeError, match="reverse order"), one, two:
        one.__exit__()


async def test_tokens_are_those_that_were_recorded(make_desk):
    desk = await make_desk(["first", "second"])

    async def rollout():
        trajectory = await desk.ask("hello")
        await desk.ask("again", trajectory)

    trajectory = await art.trajectory(rollout())
    [tokens] = await art.tokenize([trajectory])
    last = desk.run.store.calls_of(*_request(desk, trajectory))[0]
    assert tokens.tokens == [*last.prompt_ids, *last.sampled_ids] and tokens.model == "m"
    sampled = [token for token, flag in zip(tokens.tokens, tokens.flags, strict=True) if flag & TokenFlag.SAMPLED]
    assert bytes(sampled) == b"first</>second</>"
    assert [math.isnan(it) for it in tokens.logprobs] == [not flag & TokenFlag.SAMPLED for flag in tokens.flags]
    assert sum(bool(flag & TokenFlag.STOP) for flag in tokens.flags) == 2
    trajectory.reward = 0.5
    assert tokens.trajectory is trajectory and trajectory.tokenize().reward == 0.5
    [group] = await art.tensorize([art.TrajectoryGroup([trajectory])], multi_history=True, device="cpu")
    [history] = group.trajectories[0].histories
    assert history.tokens.dtype == torch.int64 and history.logprobs.dtype == torch.float32
    assert history.tokens.tolist() == tokens.tokens


def _request(desk, trajectory):
    choice = trajectory.choices()[-1]
    [(rollout,)] = desk.run.store.rows("SELECT rollout_id FROM calls WHERE request_id = ?", [choice.art_call])
    return rollout, {choice.art_call}


async def test_tokens_of_several_sequences_have_to_be_asked_for_and_unknown_ones_are_refused(desk):
    async def rollout():
        await asyncio.gather(desk.ask("one"), desk.ask("two"))

    trajectory = await art.trajectory(rollout())
    with pytest.raises(ConfigError, match="multi_history=True"):
        await art.tokenize([trajectory])
    assert len(trajectory.tokenize(multi_history=True).histories) == 2
    assert len(trajectory.histories()[0].tokenize().tokens) > 0
    with pytest.raises(ConfigError, match="there are 0 sequences"):
        trajectory.tokenize(model="another")
    unknown = await desk.ask("hello")
    del unknown.messages_and_choices[1].art_call
    with pytest.raises(CaptureError, match="1 answers were not recorded"):
        unknown.tokenize()


def test_the_tokenizer_is_the_models(monkeypatch):
    assert art.get_tokenizer("tiny").eos_token_id is not None
    monkeypatch.setenv("ART_MODEL", "tiny")
    assert art.get_tokenizer("Qwen/Qwen2.5-7B-Instruct").eos_token == art.get_tokenizer("tiny").eos_token


async def test_yielded_trajectories_are_captured():
    async def rollout(trajectories):
        for it in trajectories:
            art.yield_trajectory(it)

    last = art.Trajectory()
    assert await art.capture_yielded_trajectory(rollout([art.Trajectory(), last])) is last
    with pytest.raises(RuntimeError, match="no trajectory"):
        await art.capture_yielded_trajectory(rollout([]))
    with pytest.raises(RuntimeError, match="capture_yielded_trajectory"):
        art.yield_trajectory(last)


async def test_a_wrapped_langgraph_rollout_is_captured_with_its_tools(make_desk):
    desk = await make_desk(lambda request: "done" if request["messages"][-1]["role"] == "tool" else CALL)

    async def rollout(scenario):
        agent = create_agent(init_chat_model("m", temperature=0.5, max_tokens=20), tools=[look])
        answer = await agent.ainvoke({"messages": [("user", scenario)]})
        assert answer["messages"][-1].content == "done"
        return art.Trajectory(reward=1.0, metadata={"scenario": scenario})

    wrapped = wrap_rollout(desk.model, rollout)
    group = await art.TrajectoryGroup([wrapped("Oslo"), wrapped("Rome")])
    for trajectory, city in zip(group, ("Oslo", "Rome"), strict=True):
        assert [m["role"] for m in trajectory.messages()] == ["user", "assistant", "tool", "assistant"]
        assert trajectory.messages()[0]["content"] == city == trajectory.metadata["scenario"]
        assert trajectory.history().tools[0]["function"]["name"] == "look" and trajectory.reward == 1.0
    assert {request["temperature"] for request in desk.engine.requests} == {0.5}
    group.trajectories[0].reward = 0.0
    await desk.backend.train(desk.model, [group])
    assert [len(calls) for calls in desk.trained()] == [2, 2]


class City(BaseModel):
    city: str


async def test_the_chat_model_is_langchains_own_with_all_it_can_do(make_desk):
    desk = await make_desk(['{"city": "Oslo"}', "in pieces", "from tuples"])

    @functools.partial(wrap_rollout, desk.model)
    async def rollout():
        model = init_chat_model(stop=["x"])
        structured = model.with_structured_output(City, include_raw=True, method="json_schema")
        assert (await structured.ainvoke("where?"))["parsed"] == City(city="Oslo")
        assert len([it async for it in model.astream("hello")]) > 1
        await model.bind_tools([look], tool_choice="look").ainvoke([("system", "s"), ("user", "u")])
        return art.Trajectory()

    trajectory = await rollout()
    assert said(trajectory) == ['{"city": "Oslo"}', "in pieces", "from tuples"]
    assert desk.engine.requests[0]["stop"] == ["x"]


async def test_a_wrapped_rollout_must_return_a_trajectory_and_a_model_needs_a_wrapped_rollout(desk):
    @functools.partial(wrap_rollout, desk.model)
    async def rollout(**options):
        init_chat_model(**options)
        return {"reward": 1.0}

    with pytest.raises(TypeError, match="returned dict"):
        await rollout()
    for options in ({"model": "gpt-5"}, {"model_provider": "anthropic"}, {"configurable_fields": "any"}):
        with pytest.raises(ConfigError, match=r"gpt-5|anthropic|configurable_fields"):
            await rollout(**options)
    with pytest.raises(ConfigError, match="wrap_rollout"):
        init_chat_model()
