"""Compiled graphs run as they are, every call knows its node, and concurrent runs stay apart."""

import asyncio
import subprocess
import sys
from typing import TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph

import art_langchain
import art_langgraph
import art_openai
from art_core.errors import AgentError

MODEL = ChatOpenAI(model="m", api_key="agent", base_url="http://127.0.0.1:9/v1")

for plugin in (art_openai, art_langchain, art_langgraph):
    plugin.redirect_clients()


@tool
def weather(city: str) -> str:
    """Tell the weather; sync, so it runs in a thread, and it asks the model itself."""
    return f"{MODEL.invoke('hello').text} about {city}"


def ask(state: MessagesState) -> dict:
    return {"messages": [MODEL.invoke(state["messages"])]}


async def ask_async(state: MessagesState) -> dict:
    return {"messages": [await MODEL.ainvoke(state["messages"])]}


def graph_of(*nodes) -> StateGraph:
    return StateGraph(MessagesState).add_sequence(list(nodes)).add_edge(START, nodes[0][0])


async def test_a_graph_runs_as_it_is(stub):
    run = art_langgraph.adapt_agent(create_agent(MODEL, tools=[weather]))
    with stub.rollout("one") as address:
        output = await run({"messages": [{"role": "user", "content": "hello"}]}, address)
    assert [message.type for message in output["messages"]] == ["human", "ai", "tool", "ai"]
    assert output["messages"][2].content == "answer of one about one"
    assert len(stub.of("one")) == 3


@pytest.mark.system
async def test_64_concurrent_graphs_land_at_their_own_addresses(stub):
    run = art_langgraph.adapt_agent(create_agent(MODEL, tools=[weather]))

    async def once(rollout_id: str) -> str:
        with stub.rollout(rollout_id) as address:
            output = await run("hello", address)
        return output["messages"][2].content

    names = [f"r{i}" for i in range(64)]
    assert await asyncio.gather(*map(once, names)) == [f"answer of {name} about {name}" for name in names]
    assert [len(stub.of(name)) for name in names] == [3] * 64
    assert stub.of(None) == []


async def test_every_call_knows_its_node_and_the_nodes_around_it(stub):
    helper = create_agent(MODEL, tools=[])

    async def planner(state: MessagesState) -> dict:
        await helper.ainvoke(state)
        return await helper.ainvoke(state)

    team = graph_of(("writer", ask), ("critic", ask_async)).compile()
    graph = graph_of(("planner", planner), ("team", team), ("last", ask)).compile()
    with stub.rollout() as address:
        await art_langgraph.adapt_agent(graph)("hello", address)
    names = [asked.headers["x-art-agent"] for asked in stub.of("r")]
    assert names == ["planner/model", "planner/model", "team/writer", "team/critic", "last"]


async def test_runs_of_a_graph_with_a_checkpointer_do_not_continue_each_other(stub):
    run = art_langgraph.adapt_agent(graph_of(("ask", ask_async)).compile(checkpointer=InMemorySaver()))
    for rollout_id in ("one", "two"):
        with stub.rollout(rollout_id) as address:
            output = await run("hello", address)
            assert len(output["messages"]) == 2


async def test_state_that_is_not_messages_is_passed_as_it_is(stub):
    class State(TypedDict):
        word: str

    def shout(state: State) -> dict:
        return {"word": state["word"].upper()}

    run = art_langgraph.adapt_agent(StateGraph(State).add_sequence([shout]).add_edge(START, "shout").compile())
    assert await run({"word": "yes"}, stub.address("r")) == {"word": "YES"}


async def test_the_graphs_own_recursion_limit_counts(stub):
    loop = graph_of(("ask", ask_async)).add_conditional_edges("ask", lambda state: "ask", ["ask", END])
    run = art_langgraph.adapt_agent(loop.compile().with_config(recursion_limit=4))
    with stub.rollout() as address, pytest.raises(GraphRecursionError):
        await run("hello", address)
    assert len(stub.of("r")) == 4


def test_only_compiled_graphs_are_adapted():
    assert art_langgraph.adapt_agent(MODEL) is None
    assert art_langgraph.adapt_agent(lambda task: task) is None
    with pytest.raises(AgentError, match=r"graph\.compile\(\)"):
        art_langgraph.adapt_agent(graph_of(("ask", ask)))


@pytest.mark.system
def test_importing_the_plugin_does_not_import_langgraph():
    code = "import art_langgraph, sys; assert not {'langgraph', 'langchain_core'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
