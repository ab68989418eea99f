"""Graphs of every kind run inside a rollout as they run elsewhere, and every call knows its node."""

import asyncio
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import pydantic
import pytest
from langchain.agents import create_agent
from langchain_core.messages import BaseMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.pregel import Pregel
from langgraph.runtime import Runtime
from langgraph.store.memory import InMemoryStore
from langgraph.types import CachePolicy, RetryPolicy, Send
from langgraph_supervisor import create_supervisor
from langgraph_swarm import create_handoff_tool, create_swarm
from openai import DefaultAsyncHttpxClient, DefaultHttpxClient

import art_langchain
import art_langgraph
import art_openai
from art_core.errors import CaptureError

MODEL = ChatOpenAI(model="m", api_key="agent", base_url="http://127.0.0.1:9/v1")

for plugin in (art_openai, art_langchain, art_langgraph):
    plugin.redirect_clients()

pytestmark = pytest.mark.filterwarnings("ignore:create_react_agent has been moved")


@tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"rain in {city}"


class City(pydantic.BaseModel):
    """A city."""

    city: str


class Topics(TypedDict):
    """State that is not messages."""

    topic: str
    jokes: Annotated[list[str], operator.add]


def prebuilt(model: ChatOpenAI) -> Pregel:
    return create_agent(model, tools=[weather])


def structured(model: ChatOpenAI) -> Pregel:
    return create_agent(model, tools=[], response_format=City)


def sub_graphs(model: ChatOpenAI) -> Pregel:
    """One sub-graph is called inside a node; one is a node, with a checkpointer of its own."""
    writer = create_agent(model, tools=[weather])

    async def team(state: MessagesState) -> dict[str, Any]:
        return {"messages": (await writer.ainvoke(state))["messages"][-1:]}

    def critic(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    inner = StateGraph(MessagesState).add_sequence([critic]).add_edge(START, "critic")
    outer = StateGraph(MessagesState).add_node("team", team)
    outer.add_node("review", inner.compile(checkpointer=InMemorySaver()))
    return outer.add_edge(START, "team").add_edge("team", "review").compile(checkpointer=InMemorySaver())


def parallel(model: ChatOpenAI) -> Pregel:
    """Fans out by ``Send`` and in again."""

    def split(state: Topics) -> list[Send]:
        return [Send("joke", {"topic": f"{state['topic']} {i}"}) for i in range(3)]

    async def joke(state: Topics) -> dict[str, Any]:
        return {"jokes": [(await model.ainvoke(state["topic"])).text]}

    def best(state: Topics) -> dict[str, Any]:
        return {"topic": model.invoke(" ".join(state["jokes"])).text}

    graph = StateGraph(Topics).add_node("joke", joke).add_node("best", best)
    return graph.add_conditional_edges(START, split, ["joke"]).add_edge("joke", "best").compile()


def supervisor(model: ChatOpenAI) -> Pregel:
    researcher = create_agent(model, tools=[weather], name="researcher")
    return create_supervisor([researcher], model=model).compile()


def swarm(model: ChatOpenAI) -> Pregel:
    alice = create_agent(model, tools=[create_handoff_tool(agent_name="bob")], name="alice")
    bob = create_agent(model, tools=[weather], name="bob")
    return create_swarm([alice, bob], default_active_agent="alice").compile(checkpointer=InMemorySaver())


def functional(model: ChatOpenAI) -> Pregel:
    @task
    def draft(topic: str) -> str:
        return model.invoke(topic).text

    @task
    async def polish(text: str) -> str:
        return (await model.ainvoke(text)).text

    @entrypoint(checkpointer=InMemorySaver())
    async def essay(topic: str) -> str:
        drafts = [draft(topic), draft(f"{topic} again")]
        return await polish(" ".join([await text for text in drafts]))

    return essay


def streaming(model: ChatOpenAI) -> Pregel:
    """Streams inside its nodes, both ways."""

    async def first(state: Topics) -> dict[str, Any]:
        return {"jokes": [chunk.text async for chunk in model.astream(state["topic"])]}

    def second(state: Topics) -> dict[str, Any]:
        return {"jokes": [chunk.text for chunk in model.stream(state["topic"])]}

    return StateGraph(Topics).add_sequence([first, second]).add_edge(START, "first").compile()


MESSAGES = "hello"
TOPIC = {"topic": "cats", "jokes": []}

GRAPHS: dict[str, tuple[Callable[[ChatOpenAI], Pregel], Any, list[str]]] = {
    "prebuilt": (prebuilt, MESSAGES, ["model", "model"]),
    "structured": (structured, MESSAGES, ["model"]),
    "sub-graphs": (sub_graphs, MESSAGES, ["team/model", "team/model", "review/critic"]),
    "parallel": (parallel, TOPIC, ["joke", "joke", "joke", "best"]),
    "supervisor": (supervisor, MESSAGES, ["supervisor/agent", "researcher/model", "supervisor/agent"]),
    "swarm": (swarm, MESSAGES, ["alice/model", "bob/model"]),
    "functional": (functional, "cats", ["essay/draft", "essay/draft", "essay/polish"]),
    "streaming": (streaming, TOPIC, ["first", "second"]),
}
"""How it is made, what it is given, and which nodes call the model."""


def plain(value: Any) -> Any:
    """Return a state without what differs from run to run."""
    if isinstance(value, BaseMessage):
        calls = [(call["name"], call["args"]) for call in getattr(value, "tool_calls", ())]
        return (value.type, value.content, value.name, calls)
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list) else value


@pytest.fixture
async def direct(stub):
    """A model that asks a plain server, which answers for "outside"; its connections end with the test."""
    async with DefaultAsyncHttpxClient() as http_async_client:
        with DefaultHttpxClient() as http_client:
            clients = {"http_client": http_client, "http_async_client": http_async_client}
            yield ChatOpenAI(model="m", api_key="agent", base_url=f"{stub.url}/v1", **clients)


@pytest.mark.parametrize("kind", list(GRAPHS))
async def test_a_graph_gives_what_it_gives_at_a_plain_server(stub, direct, kind):
    make, given, nodes = GRAPHS[kind]
    expected = await art_langgraph.adapt_agent(make(direct))(given, stub.address("a thread"))
    assert len(stub.of(None)) == len(nodes)
    with stub.rollout("outside") as address:
        output = await art_langgraph.adapt_agent(make(MODEL))(given, address)
    assert plain(output) == plain(expected)
    asked = stub.of("outside")
    assert sorted(request.headers["x-art-agent"] for request in asked) == sorted(nodes)
    assert len(stub.of(None)) == len(nodes)
    if kind == "streaming":
        assert all(request.body["stream"] for request in asked)


@pytest.mark.system
async def test_64_concurrent_teams_stay_apart(stub):
    run = art_langgraph.adapt_agent(supervisor(MODEL))

    async def once(rollout_id: str) -> str:
        with stub.rollout(rollout_id) as address:
            return (await run(MESSAGES, address))["messages"][-1].content

    names = [f"r{i}" for i in range(64)]
    assert await asyncio.gather(*map(once, names)) == [f"answer of {name}" for name in names]
    assert [len(stub.of(name)) for name in names] == [3] * 64
    assert stub.of(None) == []


@dataclass
class Reader:
    language: str


async def test_store_and_context_reach_the_nodes(stub):
    store = InMemoryStore()
    store.put(("facts",), "sky", {"colour": "blue"})

    def tell(state: Topics, runtime: Runtime[Reader]) -> dict[str, Any]:
        return {"topic": f"{runtime.store.get(('facts',), 'sky').value['colour']} in {runtime.context.language}"}

    graph = StateGraph(Topics, context_schema=Reader).add_sequence([tell]).add_edge(START, "tell").compile(store=store)
    with stub.rollout() as address:
        output = await art_langgraph.answering(graph, str, context=Reader("French"))(TOPIC, address)
    assert output["topic"] == "blue in French"


@dataclass
class Speaker:
    language: str = "Dutch"


class Listener(pydantic.BaseModel):
    language: str


@pytest.mark.parametrize(("schema", "seen"), [(Speaker, "Dutch"), (Listener, "None")])
async def test_without_a_context_a_graph_gets_its_schemas_defaults_or_none(stub, schema, seen):
    def tell(state: Topics, runtime: Runtime) -> dict[str, Any]:
        return {"topic": str(getattr(runtime.context, "language", runtime.context))}

    graph = StateGraph(Topics, context_schema=schema).add_sequence([tell]).add_edge(START, "tell").compile()
    for run in (art_langgraph.adapt_agent(graph), art_langgraph.answering(graph, str)):
        with stub.rollout() as address:
            assert (await run(TOPIC, address))["topic"] == seen


async def test_a_retried_node_calls_again_and_a_cached_one_is_refused(stub):
    tries = []

    def flaky(state: Topics) -> dict[str, Any]:
        text = MODEL.invoke(state["topic"]).text
        tries.append(text)
        if len(tries) == 1:
            raise ConnectionError("again")
        return {"topic": text}

    retry = RetryPolicy(initial_interval=0.001)
    graph = StateGraph(Topics).add_node("flaky", flaky, retry_policy=retry, cache_policy=CachePolicy())
    graph.add_edge(START, "flaky")
    with stub.rollout() as address:
        assert (await art_langgraph.adapt_agent(graph.compile())(TOPIC, address))["topic"] == "answer of r"
        cached = graph.compile(cache=InMemoryCache())
        for ask in (art_langgraph.adapt_agent(cached)(TOPIC, address), cached.ainvoke(TOPIC)):
            with pytest.raises(CaptureError, match="node cache"):
                await ask
        with pytest.raises(CaptureError, match="node cache"):
            cached.invoke(TOPIC)
    assert [request.headers["x-art-agent"] for request in stub.of("r")] == ["flaky", "flaky"]
