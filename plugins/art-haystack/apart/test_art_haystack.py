"""Haystack's agents and pipelines keep every rule of an adapter."""

from haystack import Pipeline, component
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, ToolCall
from haystack.tools import AgentTool, Tool, create_tool_from_function
from haystack.utils import Secret

import art_haystack
from art_core.testing import check_adapter
from framework_table import City, assert_documented, rain, threaded


def agent_of(base_url, generation=None, **options):
    key = Secret.from_token("k")
    generator = OpenAIChatGenerator(model="m", api_base_url=base_url, api_key=key, generation_kwargs=generation)
    return Agent(chat_generator=generator, **options)


def blocking(base_url):
    return lambda text: agent_of(base_url).run([ChatMessage.from_user(text)])["last_message"].text


def asynchronous(base_url):
    return agent_of(base_url)


def streaming(base_url):
    async def agent(text):
        chunks = []

        async def collect(chunk):
            chunks.append(chunk.content)

        await agent_of(base_url).run_async([ChatMessage.from_user(text)], streaming_callback=collect)
        return "".join(chunks)

    return agent


def with_tools(base_url):
    return agent_of(base_url, tools=[create_tool_from_function(rain)])


def structured(base_url):
    return agent_of(base_url, {"response_format": City})


def pipeline_of(base_url):
    ask = AgentTool(agent_of(base_url), name="helper", description="Helps.")
    pipeline = Pipeline()
    pipeline.add_component("boss", agent_of(base_url, tools=[ask]))
    pipeline.add_component("writer", agent_of(base_url))
    pipeline.connect("boss.messages", "writer.messages")
    return pipeline


def data(text):
    return {"boss": {"messages": [ChatMessage.from_user(text)]}}


def text_of(result):
    return result["writer"]["last_message"].text


def delegating(base_url):
    pipeline = pipeline_of(base_url)
    return lambda text: text_of(pipeline.run(data(text)))


def failing(base_url):
    async def agent(text):
        raise LookupError((await agent_of(base_url).run_async([ChatMessage.from_user(text)]))["last_message"].text)

    return agent


NAMES = {"boss", "boss/helper", "writer"}
CHECKED = {"plugin": art_haystack, "packages": {"haystack"}, "agent_names": NAMES}


async def test_agents_keep_every_rule_of_an_adapter():
    agents = {"sync": blocking, "async": asynchronous, "stream": streaming, "tools": with_tools}
    agents |= {"structured output": structured, "threads": threaded(blocking)}
    agents |= {"nested agents": delegating, "failing": failing}
    assert_documented(await check_adapter(agents, framework="Haystack", **CHECKED))


async def test_pipelines_keep_every_rule_of_an_adapter():
    agents = {"nested agents": pipeline_of}
    await check_adapter(agents, framework="Haystack's pipelines", to_input=data, to_output=text_of, **CHECKED)


@component
class CallsRain:
    @component.output_types(replies=list[ChatMessage])
    def run(self, messages: list[ChatMessage], tools: list[Tool]):
        return {"replies": [ChatMessage.from_assistant(tool_calls=[ToolCall("rain", {"city": messages[0].text})])]}


async def test_an_agent_that_a_tool_ends_returns_what_the_tool_did():
    agent = Agent(chat_generator=CallsRain(), tools=[create_tool_from_function(rain)], exit_conditions=["rain"])
    assert await art_haystack.adapt_agent(agent)("Rome", None) == "rain in Rome"
    assert await art_haystack.adapt_agent(agent)({"messages": [ChatMessage.from_user("Bonn")]}, None) == "rain in Bonn"
