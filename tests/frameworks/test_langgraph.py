"""LangGraph's graphs keep every rule of an adapter, and every call knows its node."""

import operator
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, TypedDict

import pytest
from agents import Agent, OpenAIChatCompletionsModel, Runner, set_trace_processors
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send
from langgraph_supervisor import create_supervisor
from openai import AsyncOpenAI

import art_langgraph
from art_core import open_run
from art_core.testing import CountingLearner, FakeEngine, check_adapter
from framework_table import City, assert_documented, rain, user


def model(base_url):
    return ChatOpenAI(model="m", api_key="k", base_url=base_url, max_retries=0)


def plain(base_url):
    return create_agent(model(base_url), tools=[])


def blocking(base_url):
    def ask(state):
        return {"messages": [model(base_url).invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_sequence([("ask", ask)]).add_edge(START, "ask").compile()
    return lambda text: graph.invoke({"messages": user(text)})


def streaming(base_url):
    graph = plain(base_url)

    async def agent(text):
        parts = graph.astream({"messages": user(text)}, stream_mode="messages")
        return "".join([chunk.text async for chunk, _ in parts])

    return agent


class Fan(TypedDict):
    text: str
    answers: Annotated[list, operator.add]


def parallel_branches(base_url):
    """Two sync nodes at the same time, each in a thread of LangGraph's own."""

    def ask(state):
        return {"answers": [model(base_url).invoke(state["text"]).text]}

    def fan_out(state):
        return [Send("ask", {"text": state["text"] + more}) for more in ("", " Again.")]

    graph = StateGraph(Fan).add_node("ask", ask).add_conditional_edges(START, fan_out, ["ask"]).compile()

    async def agent(text):
        return sorted((await graph.ainvoke({"text": text, "answers": []}))["answers"])

    return agent


def team(base_url):
    expert = create_agent(model(base_url), tools=[], name="expert")
    with warnings.catch_warnings(action="ignore"):  # it still uses LangGraph's older prebuilt agent
        return create_supervisor([expert], model=model(base_url), prompt="Ask the expert.").compile()


def failing(base_url):
    async def ask(state):
        raise LookupError((await model(base_url).ainvoke(state["messages"])).text)

    return StateGraph(MessagesState).add_sequence([("ask", ask)]).add_edge(START, "ask").compile()


@pytest.mark.smoke
@pytest.mark.system
@pytest.mark.usefixtures("trap_network")
async def test_graphs_keep_every_rule():
    agents = {
        "sync": blocking,
        "async": plain,
        "stream": streaming,
        "tools": lambda base_url: create_agent(model(base_url), tools=[tool("weather")(rain)]),
        "structured output": lambda base_url: create_agent(model(base_url), tools=[], response_format=City),
        "threads": parallel_branches,
        "nested agents": team,
        "failing": failing,
    }
    report = await check_adapter(
        agents,
        framework="LangGraph",
        plugin=art_langgraph,
        packages=["langgraph", "langchain_core"],
        agent_names=["supervisor/agent", "expert/model"],
        to_output=lambda state: (
            [message.content for message in state["messages"]] if isinstance(state, dict) else state
        ),
    )
    assert report.checks["agent names"] == "yes"
    assert_documented(report)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # run_sync leaves the loops that it makes open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_an_agent_of_another_framework_in_a_node_has_both_names_also_in_threads(tmp_path):
    set_trace_processors([])  # traces would be sent to OpenAI

    def ask(state):
        asks = OpenAIChatCompletionsModel("m", AsyncOpenAI(api_key="k"))
        with ThreadPoolExecutor(1) as pool:
            run = pool.submit(Runner.run_sync, Agent("inner", model=asks), state["text"])
        return {"answers": [run.result().final_output, model("http://127.0.0.1:9/v1").invoke(state["text"]).text]}

    graph = StateGraph(Fan).add_node("outer", ask).add_edge(START, "outer").compile()
    parts = {"engine": FakeEngine(), "learner": CountingLearner(), "train_nodes": ["inner"], "other_nodes": "policy"}
    async with open_run(tmp_path / "run", **parts) as run:
        (group,) = await run.collect(graph, [{"text": "hi", "answers": []}], group_size=1)
    (trajectory,) = group.trajectories
    assert trajectory.error is None
    assert [call.agent for call in trajectory.calls] == ["outer/inner", "outer"]
    assert [call.thread for call in trajectory.calls] == [trajectory.rollout_id] * 2
