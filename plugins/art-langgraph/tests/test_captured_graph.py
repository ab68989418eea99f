"""The whole way through the capture server: what a graph asked is what was recorded, token for token."""

import contextlib
import json
import re

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call, wrap_tool_call
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

import art_core as art
import art_langgraph
from art_core.testing import CountingLearner, FakeEngine

MODEL = ChatOpenAI(model="m", api_key="agent", base_url="http://127.0.0.1:9/v1")


@tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"rain in {city}"


def reply(request: dict) -> dict | str:
    last = request["messages"][-1]
    if last["role"] == "tool":
        return f"There is {last['content']}."
    arguments = json.dumps({"city": last["content"]})
    return {"tool_calls": [{"id": "t1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]}


@pytest.mark.smoke
@pytest.mark.system
async def test_every_call_of_concurrent_graphs_is_recorded_whole(tmp_path):
    agent = create_agent(MODEL, tools=[weather])
    engine = FakeEngine(reply)
    async with art.open_run(tmp_path / "run", engine=engine, learner=CountingLearner()) as run:
        groups = await run.collect(agent, ["Oslo", "Rome"], group_size=16)
    assert [group.task for group in groups] == ["Oslo", "Rome"]
    for group in groups:
        for trajectory in group.trajectories:
            assert trajectory.error is None
            assert trajectory.messages()[-1]["content"] == f"There is rain in {group.task}."
            first, second = trajectory.calls
            assert [call.agent for call in trajectory.calls] == ["model", "model"]
            assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
            assert all(len(call.sampled_ids) == len(call.logprobs) > 0 for call in trajectory.calls)
    assert len(engine.requests) == 64


async def test_a_streaming_graph_is_recorded_whole(tmp_path):
    async def stream(task: str) -> str:
        graph = create_agent(MODEL, tools=[weather])
        updates = graph.astream({"messages": [("user", task)]}, stream_mode="messages")
        return "".join([chunk.text async for chunk, _ in updates if chunk.type == "AIMessageChunk"])

    async with art.open_run(tmp_path / "run", engine=FakeEngine(reply), learner=CountingLearner()) as run:
        (group,) = await run.collect(stream, ["Oslo"], group_size=4)
    assert [trajectory.output for trajectory in group.trajectories] == ["There is rain in Oslo."] * 4
    assert [[call.request.get("stream") for call in t.calls] for t in group.trajectories] == [[True, True]] * 4


async def test_every_call_carries_the_thread_that_it_belongs_to(tmp_path):
    graph = create_agent(MODEL, tools=[], checkpointer=InMemorySaver())

    async def two_threads(task: str) -> None:
        for thread in ("a", "b/ü"):
            await graph.ainvoke({"messages": [("user", task)]}, {"configurable": {"thread_id": thread}})

    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()) as run:
        (by_function,) = await run.collect(two_threads, ["Oslo"], group_size=2)
        (by_graph,) = await run.collect(graph, ["Oslo"], group_size=2)
    assert [[call.thread for call in t.calls] for t in by_function.trajectories] == [["a", "b/ü"]] * 2
    assert [[call.thread for call in t.calls] for t in by_graph.trajectories] == [
        [t.rollout_id] for t in by_graph.trajectories
    ]


@wrap_model_call
def sync_model_call(request, handler):
    return handler(request)


@wrap_tool_call
def sync_tool_call(request, handler):
    return handler(request)


def with_sqlite(folder):
    sqlite = pytest.importorskip("langgraph.checkpoint.sqlite", reason="pip install langgraph-checkpoint-sqlite")
    saver = sqlite.SqliteSaver.from_conn_string(str(folder / "threads.sqlite"))
    return saver, lambda saver: create_agent(MODEL, tools=[weather], checkpointer=saver)


def with_middleware(middleware):
    return contextlib.nullcontext(middleware), lambda it: create_agent(MODEL, tools=[weather], middleware=[it])


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("kind", [with_sqlite, sync_model_call, sync_tool_call], ids=["sqlite", "model", "tool"])
async def test_a_graph_that_works_only_synchronously_says_how_to_pass_it(tmp_path, kind, resumed):
    opened, graph_of = kind(tmp_path) if kind is with_sqlite else with_middleware(kind)
    with opened as part:
        graph = graph_of(part)

        advised = {"graph": graph}

        def agent(task, address):
            return advised["agent"](task, address)["messages"][-1].text

        as_it_is = art_langgraph.answering(graph, lambda value: value) if resumed else graph
        async with art.open_run(tmp_path / "run", engine=FakeEngine(reply), learner=CountingLearner()) as run:
            (failed,) = await run.collect(as_it_is, ["Oslo"], group_size=2, allow_no_calls=True)
            for trajectory in failed.trajectories:
                advice = re.search(r"NotImplementedError: .*async.*(def agent.*rollout_id\}\}\))", trajectory.error)
                exec(advice[1], advised)
            (group,) = await run.collect(agent, ["Oslo"], group_size=2)
    assert [trajectory.output for trajectory in group.trajectories] == ["There is rain in Oslo."] * 2
    assert [[call.agent for call in t.calls] for t in group.trajectories] == [["model", "model"]] * 2
