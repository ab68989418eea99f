"""Agents of the OpenAI Agents SDK keep every rule of an adapter, through chat completions and through Responses."""

import gc
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_trace_processors

import art_openai
from art_core.testing import check_adapter
from framework_table import City, assert_documented, rain

pytestmark = pytest.mark.system


class Sdk:
    """Makes agents of the SDK whose models ask through one of its two APIs."""

    def __init__(self, api):
        self.api = api

    def agent(self, base_url, **more):
        model = self.api("m", openai.AsyncOpenAI(api_key="k", base_url=base_url, max_retries=0))
        return Agent(**{"name": "agent", "model": model, **more})

    def with_tools(self, base_url):
        return self.agent(base_url, tools=[function_tool(rain, name_override="weather")])

    def structured(self, base_url):
        return self.agent(base_url, output_type=City)

    def blocking(self, base_url):
        # Made in the thread that runs it: a client belongs to one event loop.
        return lambda text: Runner.run_sync(self.agent(base_url), text).final_output

    def threaded(self, base_url):
        ask = self.blocking(base_url)

        def agent(text):
            with ThreadPoolExecutor(2) as pool:  # three runs in two threads: one thread's loop serves twice
                return list(pool.map(ask, [text, f"{text} Again.", f"{text} Once more."]))

        return agent

    def streaming(self, base_url):
        made = self.agent(base_url)

        async def agent(text):
            result = Runner.run_streamed(made, text)
            return [event.type async for event in result.stream_events()], result.final_output

        return agent

    def handing_over(self, base_url):
        expert = self.agent(base_url, name="expert", handoff_description="Knows.")
        return self.agent(base_url, name="desk", handoffs=[expert])

    def failing(self, base_url):
        async def agent(text):
            raise LookupError((await Runner.run(self.agent(base_url), text)).final_output)

        return agent


@pytest.mark.parametrize(
    ("framework", "api"),
    [
        ("OpenAI Agents SDK, chat completions", OpenAIChatCompletionsModel),
        ("OpenAI Agents SDK, Responses", OpenAIResponsesModel),
    ],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # run_sync leaves the loops that it makes open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("trap_network")
async def test_agents_of_the_sdk_keep_every_rule(framework, api):
    set_trace_processors([])  # traces would be sent to OpenAI
    sdk = Sdk(api)
    agents = {
        "sync": sdk.blocking,
        "async": sdk.agent,
        "stream": sdk.streaming,
        "tools": sdk.with_tools,
        "structured output": sdk.structured,
        "threads": sdk.threaded,
        "nested agents": sdk.handing_over,
        "failing": sdk.failing,
    }
    report = await check_adapter(
        agents,
        framework=framework,
        plugin=art_openai,
        packages=["openai", "agents"],
        agent_names=["desk", "expert"],
    )
    gc.collect()  # the open loops go now, while their warnings are ignored
    assert report.checks["agent names"] == "yes"
    assert_documented(report)
