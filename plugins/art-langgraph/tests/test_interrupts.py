"""A graph that stops to ask is answered and goes on: one trajectory across its interrupts."""

import asyncio
import operator
from typing import Annotated, Any, TypedDict

import pytest
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

import art_langchain
import art_langgraph
import art_openai
from art_core.errors import AgentError

MODEL = ChatOpenAI(model="m", api_key="agent", base_url="http://127.0.0.1:9/v1")

for plugin in (art_openai, art_langchain, art_langgraph):
    plugin.redirect_clients()

TOPIC = {"topic": "cats", "jokes": []}


class Topics(TypedDict):
    """State that is not messages."""

    topic: str
    jokes: Annotated[list[str], operator.add]


def asking(model: ChatOpenAI) -> StateGraph:
    """Asks a human twice at the same time, between two model calls."""

    def plan(state: Topics) -> dict[str, Any]:
        return {"jokes": [model.invoke(state["topic"]).text]}

    def budget(state: Topics) -> dict[str, Any]:
        return {"jokes": [f"budget {interrupt({'ask': 'budget'})}"]}

    def place(state: Topics) -> dict[str, Any]:
        return {"jokes": [f"place {interrupt({'ask': 'place'})}"]}

    def decide(state: Topics) -> dict[str, Any]:
        return {"topic": model.invoke(" ".join(state["jokes"])).text}

    graph = StateGraph(Topics)
    for node in (plan, budget, place, decide):
        graph.add_node(node.__name__, node)
    graph.add_edge(START, "plan").add_edge("plan", "budget").add_edge("plan", "place")
    return graph.add_edge(["budget", "place"], "decide")


def answer(asked: dict[str, str]) -> str:
    return {"budget": "small", "place": "Oslo"}[asked["ask"]]


async def answer_async(asked: dict[str, str]) -> str:
    await asyncio.sleep(0)
    return answer(asked)


@pytest.mark.parametrize("by", [answer, answer_async])
async def test_interrupts_that_wait_together_are_each_given_their_own_answer(stub, by):
    agent = art_langgraph.answering(asking(MODEL).compile(checkpointer=InMemorySaver()), by)
    for rollout_id in ("one", "two"):
        with stub.rollout(rollout_id) as address:
            output = await agent(TOPIC, address)
        assert output == {
            "topic": f"answer of {rollout_id}",
            "jokes": [f"answer of {rollout_id}", "budget small", "place Oslo"],
        }
        assert [request.headers["x-art-agent"] for request in stub.of(rollout_id)] == ["plan", "decide"]


async def test_one_interrupt_after_another_is_answered_and_breakpoints_are_passed(stub):
    def count(state: Topics) -> dict[str, Any]:
        return {"jokes": [interrupt("one") + interrupt("two")]}

    graph = StateGraph(Topics).add_sequence([count, ("last", lambda state: {"topic": "done"})]).add_edge(START, "count")
    agent = art_langgraph.answering(
        graph.compile(checkpointer=InMemorySaver(), interrupt_before=["count"], interrupt_after=["last"]), str.upper
    )
    with stub.rollout() as address:
        assert await agent(TOPIC, address) == {"topic": "done", "jokes": ["ONETWO"]}


async def test_an_interrupt_of_a_sub_graph_and_of_a_functional_workflow_is_answered(stub):
    @task
    def ask(question: str) -> str:
        return MODEL.invoke(question + interrupt("which?")).text

    @entrypoint(checkpointer=InMemorySaver())
    def workflow(question: str) -> str:
        return ask(question).result()

    team = StateGraph(Topics).add_node("team", asking(MODEL).compile()).add_edge(START, "team")
    team_agent = art_langgraph.answering(team.compile(checkpointer=InMemorySaver()), answer)
    with stub.rollout() as address:
        assert await art_langgraph.answering(workflow, lambda asked: f" {asked} this")("what", address) == "answer of r"
        assert (await team_agent(TOPIC, address))["topic"] == "answer of r"
    first, *team_calls = stub.of("r")
    assert first.body["messages"][0]["content"] == "what which? this"
    assert [request.headers["x-art-agent"] for request in team_calls] == ["team/plan", "team/decide"]


async def test_an_unanswered_interrupt_is_in_the_state_that_the_graph_returns(stub):
    run = art_langgraph.adapt_agent(asking(MODEL).compile(checkpointer=InMemorySaver()))
    with stub.rollout() as address:
        output = await run(TOPIC, address)
    assert sorted(asked.value["ask"] for asked in output["__interrupt__"]) == ["budget", "place"]
    assert len(stub.of("r")) == 1


async def test_a_graph_that_interrupts_without_a_checkpointer_gets_langgraphs_own_error(stub):
    agent = art_langgraph.answering(asking(MODEL).compile(), answer)
    with stub.rollout() as address, pytest.raises(RuntimeError, match="without checkpointer"):
        await agent(TOPIC, address)


async def test_what_is_no_compiled_graph_cannot_be_answered_for():
    with pytest.raises(AgentError, match=r"graph\.compile\(\)"):
        art_langgraph.answering(asking(MODEL), answer)


async def test_sqlite_keeps_the_threads_of_runs_apart(stub, tmp_path):
    sqlite = pytest.importorskip("langgraph.checkpoint.sqlite.aio", reason="pip install langgraph-checkpoint-sqlite")
    async with sqlite.AsyncSqliteSaver.from_conn_string(str(tmp_path / "threads.sqlite")) as saver:
        agent = art_langgraph.answering(asking(MODEL).compile(checkpointer=saver), answer)
        for rollout_id in ("one", "two"):
            with stub.rollout(rollout_id) as address:
                assert (await agent(TOPIC, address))["topic"] == f"answer of {rollout_id}"
    assert [len(stub.of(rollout_id)) for rollout_id in ("one", "two")] == [2, 2]


async def test_a_function_that_resumes_by_itself_is_captured_across_the_interrupt(stub):
    graph = asking(MODEL).compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "mine"}}
    with stub.rollout():
        stopped = await graph.ainvoke(TOPIC, config)
        resume = {asked.id: answer(asked.value) for asked in stopped["__interrupt__"]}
        await asyncio.to_thread(graph.invoke, Command(resume=resume), config)
    assert [request.headers["x-art-agent"] for request in stub.of("r")] == ["plan", "decide"]


def test_an_answer_that_is_no_function_is_refused_at_once():
    graph = StateGraph(MessagesState).add_sequence([("ask", lambda state: {})]).add_edge(START, "ask").compile()
    with pytest.raises(AgentError, match="got 'yes'"):
        art_langgraph.answering(graph, "yes")
