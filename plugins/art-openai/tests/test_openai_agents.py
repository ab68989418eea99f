"""Agents of the OpenAI Agents SDK: captured as they are, every call with the name of the agent whose turn it is."""

import asyncio
import json
from typing import Generic, TypeVar

import agents
import openai
import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool

import art_core as art
import art_openai
from art_core.errors import AgentError, CaptureError
from art_core.plugins import Plugins
from art_core.testing import CountingLearner, FakeEngine
from art_openai import agents_sdk

CLIENT = openai.AsyncOpenAI(api_key="agent", base_url="http://127.0.0.1:9/v1")
CHAT = OpenAIChatCompletionsModel(model="m", openai_client=CLIENT)

art_openai.redirect_clients()


class Traces(agents.TracingProcessor):
    """Keeps the names of the traces that would be exported."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_trace_start(self, trace) -> None:
        self.names.append(trace.name)

    def on_trace_end(self, trace) -> None: ...
    def on_span_start(self, span) -> None: ...
    def on_span_end(self, span) -> None: ...
    def shutdown(self, timeout: float | None = None) -> None: ...
    def force_flush(self) -> None: ...


@pytest.fixture(autouse=True)
def traces():
    """Stands where the SDK's exporter stood."""
    traces = Traces()
    agents.set_trace_processors([traces])
    return traces


@pytest.fixture
def with_gateway(monkeypatch):
    monkeypatch.setattr("art_openai.client._gateway", lambda: True)


@function_tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"rain in {city}"


def team(model=CHAT) -> Agent:
    """A triage agent that hands over to one who has a tool and asks another agent."""
    poet = Agent("poet", instructions="poet", model=model)
    tools = [weather, poet.as_tool("make_verse", "Say it in verse.")]
    forecaster = Agent("forecaster", instructions="forecaster", tools=tools, model=model)
    return Agent("triage", instructions="triage", handoffs=[forecaster], model=model)


def call(name: str, **arguments: str) -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"tool_calls": [{"id": f"t-{name}", "type": "function", "function": function}]}


def reply(request: dict) -> dict | str:
    who, *said = request["messages"]
    if who["content"] == "triage":
        return call("transfer_to_forecaster")
    if who["content"] == "poet":
        return f"O {said[-1]['content']}!"
    results = [message["content"] for message in said if message["role"] == "tool"]
    if len(results) == 1:  # what the handing over said
        return call("weather", city=said[0]["content"])
    return call("make_verse", input=results[-1]) if len(results) == 2 else f"Verse: {results[-1]}"


NAMES = ["triage", "forecaster", "forecaster", "poet", "forecaster"]


def open_run(folder, **settings):
    return art.open_run(folder / "run", engine=FakeEngine(reply), learner=CountingLearner(), **settings)


async def test_a_team_of_agents_is_recorded_whole_and_every_call_has_its_agents_name(tmp_path, traces):
    async with open_run(tmp_path) as run:
        groups = await run.collect(team(), ["Oslo", "Rome"], group_size=8)
    for group in groups:
        for trajectory in group.trajectories:
            assert trajectory.error is None
            assert trajectory.output == f"Verse: O rain in {group.task}!"
            assert [call.agent for call in trajectory.calls] == NAMES
            assert all(len(call.sampled_ids) == len(call.logprobs) > 0 for call in trajectory.calls)
    assert traces.names == []


@pytest.mark.parametrize("tracing", [True, False])
@pytest.mark.parametrize("way", ["run", "streamed", "sync"])
async def test_a_function_that_uses_the_runner_is_an_agent_traced_or_not(tmp_path, traces, way, tracing):
    async def plain(task: str) -> str:
        return (await Runner.run(team(), task)).final_output

    async def streamed(task: str) -> str:
        result = Runner.run_streamed(team(), task)
        kinds = {event.type async for event in result.stream_events()}
        assert {"raw_response_event", "agent_updated_stream_event"} <= kinds
        return result.final_output

    def sync(task: str) -> str:
        return Runner.run_sync(team(), task).final_output

    agent = {"run": plain, "streamed": streamed, "sync": sync}[way]
    agents.set_tracing_disabled(not tracing)
    try:
        async with open_run(tmp_path) as run:
            (group,) = await run.collect(agent, ["Oslo"], group_size=4)
    finally:
        agents.set_tracing_disabled(False)
    assert [t.error for t in group.trajectories] == [None] * 4
    assert [t.output for t in group.trajectories] == ["Verse: O rain in Oslo!"] * 4
    assert [[call.agent for call in t.calls] for t in group.trajectories] == [NAMES] * 4
    assert [[bool(c.request.get("stream")) for c in t.calls] for t in group.trajectories] == [
        [way == "streamed" and name != "poet" for name in NAMES]
    ] * 4
    assert len(traces.names) == (4 if tracing else 0)


async def test_an_agent_that_fails_is_data(tmp_path):
    def loop(request: dict) -> dict:
        return call("weather", city="Oslo")

    agent = Agent("restless", tools=[weather], model=CHAT)
    async with art.open_run(tmp_path / "run", engine=FakeEngine(loop), learner=CountingLearner()) as run:
        (group,) = await run.collect(agent, ["Oslo"], group_size=2)
    assert [t.error.partition(":")[0] for t in group.trajectories] == ["MaxTurnsExceeded"] * 2
    assert [len(t.calls) for t in group.trajectories] == [10, 10]


async def test_the_sdks_default_chat_client_is_captured(stub, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "agent")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    agents.set_default_openai_api("chat_completions")
    try:
        with stub.rollout("one"):
            assert (await Runner.run(Agent("helper", model="m"), "hello")).final_output == "answer of one"
    finally:
        agents.set_default_openai_api("responses")
    assert [asked.headers["x-art-agent"] for asked in stub.of("one")] == ["helper"]


@pytest.mark.parametrize("way", ["run", "streamed"])
async def test_responses_which_the_sdk_asks_for_by_default_are_captured(stub, with_gateway, way):
    async def run(rollout_id: str) -> str:
        agent = Agent("helper", tools=[weather], model=OpenAIResponsesModel(model="m", openai_client=CLIENT))
        with stub.rollout(rollout_id):
            if way == "run":
                return (await Runner.run(agent, "hello")).final_output
            result = Runner.run_streamed(agent, "hello")
            assert [event async for event in result.stream_events()]
            return result.final_output

    ids = [f"r{i}" for i in range(8)]
    assert await asyncio.gather(*map(run, ids)) == [f"answer of {one}" for one in ids]
    for one in ids:
        assert [asked.path for asked in stub.of(one)] == [f"/rollouts/{one}/v1/responses"] * 2
        assert [asked.headers["x-art-agent"] for asked in stub.of(one)] == ["helper"] * 2
    assert stub.of(None) == []


async def test_responses_without_the_gateway_stop_the_run_and_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("art_openai.client._gateway", lambda: False)
    agent = Agent("helper", model=OpenAIResponsesModel(model="m", openai_client=CLIENT))
    async with open_run(tmp_path) as run:
        with pytest.raises(CaptureError, match=r"pip install -e integrations/art-gateway"):
            await run.collect(agent, ["hello"], group_size=1)


class Elsewhere(agents.Model):
    """A model that asks past the OpenAI client."""

    model = "elsewhere"

    async def get_response(self, *args, **kwargs):
        return agents.ModelResponse(output=[], usage=agents.Usage(), response_id=None)

    async def stream_response(self, *args, **kwargs):
        yield "event"


class Wrapping(agents.Model):
    """A model of the user's own that asks through the OpenAI client after all."""

    async def get_response(self, *args, **kwargs):
        return await CHAT.get_response(*args, **kwargs)

    async def stream_response(self, *args, **kwargs):
        async for event in CHAT.stream_response(*args, **kwargs):
            yield event


async def test_a_model_that_bypasses_capture_is_an_error_unless_it_passes_through(tmp_path):
    async def streamed(task: str) -> object:
        return [event async for event in Elsewhere().stream_response()]

    async def asked(task: str) -> object:
        return (await Elsewhere().get_response()).output

    for agent in (streamed, asked):
        async with open_run(tmp_path) as run:
            with pytest.raises(CaptureError, match=r"Elsewhere \('elsewhere'\).*passthrough=\['elsewhere'\]"):
                await run.collect(agent, ["hello"], group_size=1)
    async with open_run(tmp_path / "through", passthrough=["elsewhere"]) as run:
        groups = [await run.collect(one, ["hello"], group_size=1, allow_no_calls=True) for one in (streamed, asked)]
    assert [groups[0][0].trajectories[0].output, groups[1][0].trajectories[0].output] == [["event"], []]
    assert (await Elsewhere().get_response()).output == []


async def test_models_made_after_the_run_began_are_watched_too(stub):
    with stub.rollout():

        class Late(agents.Model):
            async def get_response(self, *args, **kwargs):
                return None

            async def stream_response(self, *args, **kwargs):
                yield "event"

        with pytest.raises(CaptureError, match="Late"):
            await Late().get_response()


def test_models_with_mixins_and_generic_ones_are_made_as_ever():
    agents_sdk.watch_models()
    T = TypeVar("T")

    class Keyed:
        def __init_subclass__(cls, key: str = "", **kwargs) -> None:
            super().__init_subclass__(**kwargs)
            cls.key = key

    class Mixed(agents.Model, Keyed, key="a"): ...

    class Typed(agents.Model, Generic[T]): ...

    assert Mixed.key == "a"
    assert Typed[int].__args__ == (int,)


@pytest.mark.parametrize("defines", ["nothing", "__init_subclass__"])
def test_a_hook_of_the_interface_itself_goes_on_being_called(defines):
    made = []

    class Interface:
        if defines == "__init_subclass__":

            def __init_subclass__(cls, key: str, **kwargs) -> None:
                made.append((cls, key))

    agents_sdk._watch_all(Interface)

    class Mine(Interface, **({"key": "a"} if defines == "__init_subclass__" else {})):
        async def get_response(self): ...

    assert made == ([(Mine, "a")] if defines == "__init_subclass__" else [])
    assert hasattr(Mine.get_response, "__wrapped__")


async def test_a_model_that_asks_through_the_openai_client_in_the_end_is_captured(tmp_path):
    agent = Agent("poet", instructions="poet", model=Wrapping())

    async def streamed(task: str) -> str:
        result = Runner.run_streamed(agent, task)
        assert [event async for event in result.stream_events()]
        return result.final_output

    async with open_run(tmp_path) as run:
        groups = [await run.collect(one, ["Oslo"], group_size=1) for one in (agent, streamed)]
    for (trajectory,) in (group.trajectories for (group,) in groups):
        assert trajectory.output == "O Oslo!"
        assert [call.agent for call in trajectory.calls] == ["poet"]


def test_something_else_that_is_called_agent_is_not_taken():
    class Agent:
        __module__ = "agents.mine"

    assert art_openai.adapt_agent(Agent()) is None
    assert art_openai.adapt_agent("agent") is None
    with pytest.raises(AgentError):
        Plugins(art_openai, installed=False).adapt(Agent())
