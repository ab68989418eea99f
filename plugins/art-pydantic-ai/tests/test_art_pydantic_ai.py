"""PydanticAI agents run as they are, whatever provider their models are of, and the policy answers for all of them."""

import asyncio
import contextlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pydantic
import pytest
from pydantic_ai import Agent, ModelRetry, NativeOutput, PromptedOutput, RunContext, ToolOutput, UsageLimits
from pydantic_ai.capabilities import NativeTool, WebSearch
from pydantic_ai.direct import model_request
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.native_tools import CodeExecutionTool, WebSearchTool
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

import art_core as art
import art_openai
import art_pydantic_ai
from art_core.errors import CaptureError
from art_core.testing import CountingLearner, FakeEngine, check_adapter, scripted_reply
from framework_table import assert_documented

art_openai.redirect_clients()
EARLY = TestModel()
"""Made before anything is wrapped."""
art_pydantic_ai.redirect_clients()


class City(pydantic.BaseModel):
    """A city."""

    city: str


def openai_model(base_url="http://127.0.0.1:9/v1"):
    return OpenAIChatModel("m", provider=OpenAIProvider(base_url=base_url, api_key="k"))


def anthropic_model():
    return AnthropicModel("claude-sonnet-4-5", provider=AnthropicProvider(api_key="k", base_url="http://127.0.0.1:9"))


def function_model():
    def answer(messages, info):
        return ModelResponse(parts=[TextPart("its own answer")])

    async def stream(messages, info):
        yield "its own answer"

    return FunctionModel(answer, stream_function=stream)


class Echo(Model):
    """A model of somebody's own."""

    model_name = "echo"
    system = "mine"

    async def request(self, messages, model_settings, model_request_parameters):
        return ModelResponse(parts=[TextPart("its own answer")])


def agent(base_url):
    return Agent(openai_model(base_url))


def with_tools(base_url):
    agent = Agent(openai_model(base_url), instructions="Use the tool.")

    @agent.tool_plain
    def weather(city: str) -> str:
        """Tell the weather."""
        return f"rain in {city}"

    return agent


def structured(base_url):
    return Agent(openai_model(base_url), output_type=City)


def delegating(base_url):
    expert = Agent(openai_model(base_url), name="expert")
    boss = Agent(openai_model(base_url), name="boss")

    @boss.tool
    async def ask_expert(context: RunContext, question: str) -> str:
        """Ask the expert."""
        return (await expert.run(question, usage=context.usage)).output

    return boss


def blocking(base_url):
    def run(text):
        # run_sync makes a loop for a thread that has none, and leaves it open.
        with contextlib.closing(asyncio.new_event_loop()) as loop:
            asyncio.set_event_loop(loop)
            try:
                return Agent(openai_model(base_url)).run_sync(text).output
            finally:
                loop.run_until_complete(loop.shutdown_asyncgens())
                asyncio.set_event_loop(None)

    return run


def threaded(base_url):
    ask = blocking(base_url)

    def run(text):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(ask, [text, text + " Again."]))

    return run


def streaming(base_url):
    agent = with_tools(base_url)

    async def run(text):
        async with agent.run_stream(text) as result:
            return [part async for part in result.stream_text(delta=True, debounce_by=None)], await result.get_output()

    return run


def failing(base_url):
    agent = Agent(openai_model(base_url))

    @agent.tool_plain
    def broken(city: str) -> str:
        """Break."""
        raise LookupError(city)

    return agent


@pytest.mark.system
@pytest.mark.usefixtures("trap_network")
async def test_pydantic_ai_agents_keep_every_rule():
    agents = {
        "sync": blocking,
        "async": agent,
        "stream": streaming,
        "tools": with_tools,
        "structured output": structured,
        "threads": threaded,
        "nested agents": delegating,
        "failing": failing,
    }
    report = await check_adapter(
        agents,
        framework="PydanticAI",
        plugin=art_pydantic_ai,
        packages=["pydantic_ai", "openai"],
        agent_names=["boss", "expert"],
    )
    assert_documented(report)
    assert report.checks == {"agent names": "yes", "light import": "yes"}


@pytest.mark.parametrize("output", [ToolOutput, NativeOutput, PromptedOutput])
async def test_every_mode_of_structured_output_keeps_every_rule(output):
    def make(base_url):
        return Agent(openai_model(base_url), output_type=output(City))

    def reply(request):
        answer = scripted_reply(request)
        if not request.get("tools") and not request.get("response_format", {}).get("json_schema"):
            answer["content"] = json.dumps({"city": answer["content"].removeprefix("answer to ")})
        return answer

    await check_adapter(
        {"structured output": make}, framework="PydanticAI", plugin=art_pydantic_ai, reply=reply, runs=4
    )


@pytest.mark.parametrize("way", ["iter", "events", "handler"])
async def test_every_way_of_running_keeps_every_rule(way):
    def make(base_url):
        agent = with_tools(base_url)

        async def iterated(text):
            async with agent.iter(text) as run:
                return [type(node).__name__ async for node in run], run.result.output

        async def events(text):
            async with agent.run_stream_events(text) as stream:
                return [type(event).__name__ async for event in stream]

        async def handled(text):
            async def handle(context, events):
                async for _ in events:
                    pass

            return (await agent.run(text, event_stream_handler=handle)).output

        return {"iter": iterated, "events": events, "handler": handled}[way]

    kind = "tools" if way == "iter" else "stream"
    await check_adapter({kind: make}, framework="PydanticAI", plugin=art_pydantic_ai, runs=4)


async def collected(tmp_path, agent, *, reply=scripted_reply, **settings):
    engine = FakeEngine(reply)
    async with art.open_run(tmp_path / "run", engine=engine, learner=CountingLearner(), **settings) as run:
        (group,) = await run.collect(agent, ["task-001"], group_size=2, allow_no_calls=True)
    assert sum(len(trajectory.calls) for trajectory in group.trajectories) == len(engine.requests)
    return group.trajectories[0]


MODELS = {
    "anthropic": anthropic_model,
    "function": function_model,
    "test": TestModel,
    "early": lambda: EARLY,
    "own": Echo,
}


@pytest.mark.parametrize("model", MODELS)
async def test_models_of_every_provider_are_answered_by_the_policy_with_tools_settings_and_output(tmp_path, model):
    agent = Agent(MODELS[model](), output_type=City, model_settings={"max_tokens": 77}, instructions="Be brief.")

    @agent.tool_plain
    def weather(city: str) -> str:
        """Tell the weather."""
        return f"rain in {city}"

    trajectory = await collected(tmp_path, agent)
    assert trajectory.error is None and trajectory.output == City(city="task-001")
    first, second = [call.request for call in trajectory.calls]
    assert [tool["function"]["name"] for tool in first["tools"]] == ["weather", "final_result"]
    assert first["tool_choice"] == "required"
    assert first["max_completion_tokens"] == 77
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert second["messages"][-1] == {**second["messages"][-1], "role": "tool", "content": "rain in task-001"}


@pytest.mark.parametrize("model", ["anthropic", "function", "test"])
async def test_models_of_every_provider_stream(tmp_path, model):
    async def run(text):
        async with Agent(MODELS[model]()).run_stream(text) as result:
            return await result.get_output()

    trajectory = await collected(tmp_path, run)
    assert trajectory.output == "answer to task-001"
    assert trajectory.calls[0].request["stream"] is True


def responses_model():
    return OpenAIResponsesModel("m", provider=OpenAIProvider(base_url="http://127.0.0.1:9/v1", api_key="k"))


def searching_model():
    return OpenAIChatModel("gpt-4o-search-preview", provider=OpenAIProvider(api_key="k"))


SEARCHING = {"anthropic": anthropic_model, "responses": responses_model, "search": searching_model}
"""Models whose providers search the web."""


@pytest.mark.parametrize("model", SEARCHING)
async def test_an_optional_tool_of_the_provider_is_left_out(tmp_path, model):
    agent = Agent(SEARCHING[model](), capabilities=[NativeTool(WebSearchTool(optional=True))])
    trajectory = await collected(tmp_path, agent)
    assert (trajectory.error, trajectory.output) == (None, "answer to task-001")
    request = trajectory.calls[0].request
    assert not request.get("tools") and "web_search_options" not in request


@pytest.mark.parametrize("model", SEARCHING)
async def test_the_agents_own_search_takes_the_place_of_its_providers(tmp_path, model):
    def search(query: str) -> str:
        """Search."""
        return f"found {query}"

    trajectory = await collected(tmp_path, Agent(SEARCHING[model](), capabilities=[WebSearch(local=search)]))
    assert (trajectory.error, trajectory.output) == (None, "answer to task-001")
    assert trajectory.calls[1].request["messages"][-1]["content"] == "found task-001"


async def test_a_models_own_settings_and_direct_requests_are_kept(tmp_path):
    async def run(text):
        model = FunctionModel(lambda messages, info: None, settings={"max_tokens": 5, "stop_sequences": ["x"]})
        answer = await model_request(model, [ModelRequest.user_text_prompt(text)])
        return answer.parts[0].content

    trajectory = await collected(tmp_path, run)
    assert trajectory.output == "answer to task-001"
    assert trajectory.calls[0].request["max_completion_tokens"] == 5
    assert trajectory.calls[0].request["stop"] == ["x"]


async def test_wrapped_and_fallback_models_are_answered_once(tmp_path):
    wrapped = WrapperModel(FallbackModel(TestModel(), anthropic_model()))
    trajectory = await collected(tmp_path, Agent(wrapped))
    assert (trajectory.output, len(trajectory.calls)) == ("answer to task-001", 1)


async def test_an_overridden_model_is_answered_too(tmp_path):
    agent = Agent(openai_model())

    async def run(text):
        with agent.override(model=TestModel()):
            return (await agent.run(text)).output

    assert (await collected(tmp_path, run)).output == "answer to task-001"


async def test_a_model_that_is_let_through_answers_itself(tmp_path):
    judge = Agent(function_model(), name="judge")
    worker = Agent(TestModel(), name="worker")

    async def run(text):
        return (await worker.run(text)).output, (await judge.run(text)).output

    trajectory = await collected(tmp_path, run, passthrough=[function_model().model_name])
    assert trajectory.output == ("answer to task-001", "its own answer")
    assert [call.agent for call in trajectory.calls] == ["worker"]


async def test_outside_a_rollout_every_model_answers_itself():
    assert (await Agent(function_model()).run("x")).output == "its own answer"
    assert (await Agent(Echo()).run("x")).output == "its own answer"
    async with Agent(function_model()).run_stream("x") as result:
        assert await result.get_output() == "its own answer"


async def test_an_output_that_the_agent_refuses_is_asked_for_again(tmp_path):
    agent = Agent(TestModel(), retries={"output": 2})

    @agent.output_validator
    def check(context: RunContext, output: str) -> str:
        if context.retry == 0:
            raise ModelRetry("say it again")
        return output

    trajectory = await collected(tmp_path, agent)
    assert trajectory.error is None and len(trajectory.calls) == 2
    assert "say it again" in str(trajectory.calls[1].request["messages"][-1])


async def test_a_usage_limit_is_the_agents_failure(tmp_path):
    agent = with_tools("http://127.0.0.1:9/v1")

    async def run(text):
        return await agent.run(text, usage_limits=UsageLimits(request_limit=1))

    trajectory = await collected(tmp_path, run)
    assert trajectory.error.startswith(UsageLimitExceeded.__name__)
    assert len(trajectory.calls) == 1


async def test_an_input_that_is_a_dict_is_the_arguments_of_run(tmp_path):
    agent = Agent(TestModel(), deps_type=str)

    @agent.instructions
    def greet(context: RunContext[str]) -> str:
        return f"Talk to {context.deps}."

    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=CountingLearner()) as run:
        (group,) = await run.collect(agent, [{"input": {"user_prompt": "hello", "deps": "Ann"}}], group_size=1)
    assert group.trajectories[0].messages()[0] == {"role": "system", "content": "Talk to Ann."}


async def test_the_agent_gets_no_name_of_ours(tmp_path):
    agent = Agent(TestModel())
    trajectory = await collected(tmp_path, agent)
    assert agent.name is None and trajectory.calls[0].agent is None


async def test_a_batch_is_refused_inside_a_rollout(stub):
    with stub.rollout(), pytest.raises(CaptureError, match=r"asked for a batch.*passthrough=\['claude-sonnet-4-5'\]"):
        await anthropic_model().batch_create([])


@pytest.mark.parametrize("model", SEARCHING)
@pytest.mark.parametrize("tool", [WebSearchTool(), CodeExecutionTool()])
async def test_a_tool_that_the_provider_runs_is_refused_by_name(stub, tool, model):
    model = SEARCHING[model]()
    agent = Agent(model, capabilities=[NativeTool(tool)])
    called = f"{type(model).__name__} was called inside a rollout with {type(tool).__name__}"
    named = rf"{called}.*passthrough=\['{model.model_name}'\]"
    with stub.rollout(), pytest.raises(CaptureError, match=named):
        await agent.run("hello")
    with stub.rollout(), pytest.raises(CaptureError, match=named):
        async with agent.run_stream("hello"):
            pass


async def test_responses_models_go_through_art_openai(stub):
    model = OpenAIResponsesModel("m", provider=OpenAIProvider(base_url=f"{stub.url}/own/v1", api_key="k"))
    with stub.rollout():
        await asyncio.gather(Agent(model).run("x"), return_exceptions=True)
    assert stub.of(None) == []


def test_what_is_no_agent_is_left_to_others():
    assert art_pydantic_ai.adapt_agent(TestModel()) is None
    assert art_pydantic_ai.adapt_agent(lambda task: task) is None


@pytest.mark.smoke
@pytest.mark.system
def test_importing_the_plugin_does_not_import_pydantic_ai():
    code = "import art_pydantic_ai, sys; assert not {'pydantic_ai', 'openai'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
