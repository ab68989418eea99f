"""Teams of agents through the capture server: every call is recorded whole, with its node, in the trajectory it belongs to."""

import json
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from langgraph_supervisor import create_supervisor

import art_core as art
import art_langgraph
from art_core.testing import CountingLearner, FakeEngine
from art_core.types import Trajectory

MODEL = ChatOpenAI(model="m", api_key="agent", base_url="http://127.0.0.1:9/v1")


@tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"rain in {city}"


def call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"content": None, "tool_calls": [{"id": f"c-{name}", "type": "function", "function": function}]}


def team_reply(request: dict[str, Any]) -> dict[str, Any] | str:
    """The supervisor hands the task to the researcher, who looks the weather up; the writer is never asked."""
    names = [given["function"]["name"] for given in request["tools"]]
    results = [message["content"] for message in request["messages"] if message["role"] == "tool"]
    city = next(message["content"] for message in request["messages"] if message["role"] == "user")
    if "weather" in names:
        found = [result for result in results if result.startswith("rain")]
        return f"It is {found[0]}." if found else call("weather", city=city)
    return "Done." if any("back" in result for result in results) else call("transfer_to_researcher")


async def collected(tmp_path, agent, tasks, reply, group_size) -> list[tuple[Trajectory, ...]]:
    async with art.open_run(tmp_path / "run", engine=FakeEngine(reply), learner=CountingLearner()) as run:
        groups = await run.collect(agent, tasks, group_size=group_size)
    for trajectory in (one for group in groups for one in group.trajectories):
        assert trajectory.error is None
        assert all(len(call.sampled_ids) == len(call.logprobs) > 0 for call in trajectory.calls)
    return [group.trajectories for group in groups]


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
async def test_64_concurrent_teams_are_recorded_apart(tmp_path):
    agents = [create_agent(MODEL, tools=[weather], name=name) for name in ("researcher", "writer")]
    team = create_supervisor(agents, model=MODEL).compile()
    tasks = [f"Town{i}" for i in range(8)]
    groups = await collected(tmp_path, team, tasks, team_reply, 8)
    for city, trajectories in zip(tasks, groups, strict=True):
        for trajectory in trajectories:
            assert [call.agent for call in trajectory.calls] == [
                "supervisor/agent",
                "researcher/model",
                "researcher/model",
                "supervisor/agent",
            ]
            assert all(f"<user>{city}</>".encode() in bytes(call.prompt_ids) for call in trajectory.calls)
            asked, found = trajectory.calls[1:3]
            assert found.prompt_ids[: len(asked.prompt_ids)] == asked.prompt_ids
            assert found.response["content"] == f"It is rain in {city}."


class Plan(TypedDict):
    city: str
    text: str


def planning() -> StateGraph:
    def draft(state: Plan) -> dict[str, str]:
        return {"text": MODEL.invoke(f"draft {state['city']}").text}

    def ask(state: Plan) -> dict[str, str]:
        return {"text": f"{state['text']} {interrupt(state['city'])}"}

    def finish(state: Plan) -> dict[str, str]:
        return {"text": MODEL.invoke(state["text"]).text}

    return StateGraph(Plan).add_sequence([draft, ask, finish]).add_edge(START, "draft")


async def test_a_run_is_one_trajectory_across_its_interrupt(tmp_path):
    agent = art_langgraph.answering(planning().compile(checkpointer=InMemorySaver()), lambda city: f"yes, {city}")
    groups = await collected(tmp_path, agent, [{"city": "Oslo"}, {"city": "Rome"}], ["said"], 4)
    for city, trajectories in zip(("Oslo", "Rome"), groups, strict=True):
        for trajectory in trajectories:
            assert [call.agent for call in trajectory.calls] == ["draft", "finish"]
            assert trajectory.calls[1].request["messages"][0]["content"] == f"said yes, {city}"
            assert trajectory.output == {"city": city, "text": "said"}


async def test_a_function_that_resumes_its_graph_is_one_trajectory(tmp_path):
    graph = planning().compile(checkpointer=InMemorySaver())

    def agent(state, address):
        config = {"configurable": {"thread_id": address.rollout_id}}
        (asked,) = graph.invoke(state, config)["__interrupt__"]
        return graph.invoke(Command(resume=f"yes, {asked.value}"), config)["text"]

    (trajectories,) = await collected(tmp_path, agent, [{"city": "Oslo"}], ["said"], 4)
    for trajectory in trajectories:
        assert [call.agent for call in trajectory.calls] == ["draft", "finish"]
        assert trajectory.output == "said"


async def test_a_graph_that_nobody_answers_ends_at_its_interrupt(tmp_path):
    graph = planning().compile(checkpointer=InMemorySaver())
    ((trajectory,),) = await collected(tmp_path, graph, [{"city": "Oslo"}], ["said"], 1)
    assert [call.agent for call in trajectory.calls] == ["draft"]
    assert trajectory.output["__interrupt__"][0].value == "Oslo"


def weather_reply(request: dict[str, Any]) -> dict[str, Any] | str:
    last = request["messages"][-1]
    return f"It is {last['content']}." if last["role"] == "tool" else call("weather", city=last["content"])


async def test_an_agent_of_another_provider_is_recorded_as_one_of_openais(tmp_path):
    claude = ChatAnthropic(model="claude-sonnet-4-6", api_key="agent", base_url="http://127.0.0.1:9")
    usage = []

    def agent(model: Any) -> Any:
        async def run(city: str) -> str:
            state = {"messages": [("user", city)]}
            async for mode, value in create_agent(model, [weather]).astream(state, stream_mode=["messages", "values"]):
                if mode == "values":
                    answer = value["messages"][-1]
            usage.append(answer.usage_metadata)
            return answer.text

        return run

    prompts = []
    for model in (claude, MODEL):
        ((trajectory,),) = await collected(tmp_path / type(model).__name__, agent(model), ["Oslo"], weather_reply, 1)
        assert trajectory.output == "It is rain in Oslo."
        assert [call.agent for call in trajectory.calls] == ["model", "model"]
        assert all(call.request["stream"] for call in trajectory.calls)
        prompts.append([call.prompt_ids for call in trajectory.calls])
        sampled = trajectory.calls[-1].sampled_ids
    assert prompts[0] == prompts[1]
    # ChatOpenAI asks an address of one's own for no usage in streams; Anthropic's class always has it.
    assert usage[0]["output_tokens"] == len(sampled)
