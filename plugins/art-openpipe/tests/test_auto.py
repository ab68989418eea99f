"""Trajectories that nobody builds are what the model was asked, whoever asked and however."""

import asyncio
import functools

import openai
import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from pydantic import BaseModel

import art_openpipe as art
from art_core import open_run
from art_core.errors import ConfigError
from art_core.testing import FakeEngine
from art_openpipe.langgraph import init_chat_model, wrap_rollout

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
        trajectory = art.auto_trajectory(required=True)
        await desk.ask("hello")
        trajectory.reward = 0.5

    trajectory = await art.capture_auto_trajectory(rollout())
    assert trajectory.messages() == [*ASKED, {"role": "assistant", "content": "ok"}]
    assert trajectory.reward == 0.5
    await desk.backend.train(desk.model, [art.TrajectoryGroup([trajectory, await desk.ask("hello")])])
    assert [len(calls) for calls in desk.trained()] == [1, 1]
    assert art.auto_trajectory() is None
    with pytest.raises(RuntimeError, match="capture_auto_trajectory"):
        art.auto_trajectory(required=True)


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

    trajectory = await art.capture_auto_trajectory(rollout())
    assert said(trajectory) == [None, "rain"] and trajectory.additional_histories == []


async def test_several_choices_threads_and_streams_that_were_left_are_all_there(make_desk):
    desk = await make_desk(["a", "b", "c", "threaded", "a longer one"])

    def blocking():
        with openai.OpenAI(base_url=desk.model.inference_base_url, api_key="k") as client:
            client.chat.completions.create(model="m", messages=ASKED)

    async def rollout():
        client = desk.model.openai_client()
        await client.chat.completions.create(model="m", messages=ASKED, n=3)
        await asyncio.get_running_loop().run_in_executor(None, blocking)
        async with await client.chat.completions.create(model="m", messages=ASKED, stream=True) as stream:
            async for _ in stream:
                break

    trajectory = await art.capture_auto_trajectory(rollout())
    assert [*said(trajectory)[:4]] == ["a", "b", "c", "threaded"] and len(said(trajectory)) == 5


async def test_what_a_rollout_asks_another_model_is_not_captured(desk, tmp_path):
    async with open_run(tmp_path / "judge", engine=FakeEngine("judged")) as somebody_elses:
        address = {"inference_base_url": await somebody_elses.serving.open("judge"), "inference_api_key": "k"}
        judge = art.Model(name="judge", project="p", **address)

        async def rollout():
            await desk.ask("hello")
            answer = await judge.openai_client().chat.completions.create(model="judge", messages=ASKED)
            assert answer.choices[0].message.content == "judged"

        trajectory = await art.capture_auto_trajectory(rollout())
        await judge.aclose()
    assert said(trajectory) == ["ok"]


async def test_what_was_captured_before_a_failure_is_kept(desk):
    async def rollout():
        await desk.ask("hello")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as error:
        await art.capture_auto_trajectory(rollout())
    assert said(error.value.trajectory) == ["ok"]
    group = [art.TrajectoryGroup([art.capture_auto_trajectory(rollout())])]
    [group] = await art.gather_trajectory_groups(group, max_exceptions=1, pbar_desc=None)
    assert said(group.exceptions[0].trajectory) == ["ok"]


async def test_a_rollout_that_outlives_its_backend_keeps_its_own_error_and_what_it_had_said(desk):
    async def rollout():
        await desk.ask("hello")
        await desk.backend.close()
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as error:
        await art.capture_auto_trajectory(rollout())
    assert said(error.value.trajectory) == ["ok"]


async def test_concurrent_captures_do_not_mix(make_desk):
    desk = await make_desk(lambda request: request["messages"][-1]["content"].upper())

    async def rollout(number):
        await asyncio.gather(*(desk.ask(f"{number}-{part}") for part in "ab"))

    found = await asyncio.gather(*(art.capture_auto_trajectory(rollout(number)) for number in range(8)))
    assert [sorted(said(it)) for it in found] == [[f"{number}-A", f"{number}-B"] for number in range(8)]
    assert all(len(it.additional_histories) == 1 for it in found)


async def test_without_a_model_there_is_nothing_to_capture():
    async def rollout():
        raise AssertionError

    with pytest.raises(ConfigError, match="0 are registered"):
        await art.capture_auto_trajectory(rollout())


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
        agent = create_agent(init_chat_model("gpt-4.1", temperature=0.5, max_tokens=20), tools=[look])
        answer = await agent.ainvoke({"messages": [("user", scenario)]})
        assert answer["messages"][-1].content == "done"
        return art.Trajectory(reward=1.0, metadata={"scenario": scenario})

    wrapped = wrap_rollout(desk.model, rollout)
    group = await art.TrajectoryGroup([wrapped("Oslo"), wrapped("Rome")])
    for trajectory, city in zip(group, ("Oslo", "Rome"), strict=True):
        assert [m["role"] for m in trajectory.messages()] == ["user", "assistant", "tool", "assistant"]
        assert trajectory.messages()[0]["content"] == city == trajectory.metadata["scenario"]
        assert trajectory.tools[0]["function"]["name"] == "look" and trajectory.reward == 1.0
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
    @wrap_rollout(desk.model)
    async def rollout():
        return {"reward": 1.0}

    with pytest.raises(TypeError, match="returned dict"):
        await rollout()
    with pytest.raises(ConfigError, match="outside a wrapped rollout"):
        init_chat_model("gpt-4.1")
    with pytest.raises(ConfigError, match="configurable_fields"):
        init_chat_model(configurable_fields="any")
