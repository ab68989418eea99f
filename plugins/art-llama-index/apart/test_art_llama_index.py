"""LlamaIndex's agents and workflows keep every rule of an adapter."""

import asyncio

import pytest
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from llama_index.llms.openai import OpenAI

import art_llama_index
from art_core.testing import check_adapter
from framework_table import City, assert_documented, failing, rain, threaded


def llm(base_url):
    # A model that LlamaIndex knows to call functions.
    return OpenAI(model="gpt-4o-mini", api_base=base_url, api_key="k")


def agent_of(base_url, name="weather_man", kind=FunctionAgent, streaming=False, **settings):
    return kind(name=name, llm=llm(base_url), streaming=streaming, **settings)


def blocking(base_url):
    async def ask(text):
        return str(await agent_of(base_url).run(text))

    return lambda text: asyncio.run(ask(text))


def asking(base_url):
    async def agent(text):
        return (await llm(base_url).acomplete(text)).text

    return agent


def asynchronous(base_url):
    class Asking(Workflow):
        @step
        async def ask(self, event: StartEvent) -> StopEvent:
            return StopEvent(result={"answer": (await llm(base_url).acomplete(event.user_msg)).text})

    return Asking()


def streaming(base_url):
    return agent_of(base_url, kind=ReActAgent, streaming=True)


def with_tools(base_url):
    return agent_of(base_url, tools=[rain])


def structured(base_url):
    return agent_of(base_url, output_cls=City)


def delegating(base_url):
    helper = agent_of(base_url, "helper")

    async def ask(city: str) -> str:
        """Ask the helper."""
        return str(await helper.run(f"{city}?"))

    return AgentWorkflow(agents=[agent_of(base_url, "boss", tools=[ask])])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_agents_keep_every_rule_of_an_adapter():
    agents = {"sync": blocking, "async": asynchronous, "stream": streaming, "tools": with_tools}
    agents |= {"structured output": structured, "threads": threaded(blocking), "nested agents": delegating}
    agents |= {"failing": failing(asking)}
    packages = {"llama_index", "workflows"}
    checked = {"framework": "LlamaIndex", "plugin": art_llama_index, "packages": packages}
    assert_documented(await check_adapter(agents, agent_names={"boss", "helper"}, **checked))
