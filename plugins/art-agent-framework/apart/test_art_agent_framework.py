"""The Agent Framework's agents and workflows keep every rule of an adapter."""

import pytest
from agent_framework import Agent, WorkflowBuilder
from agent_framework.openai import OpenAIChatCompletionClient

import art_agent_framework
from art_core.errors import AgentError
from art_core.testing import check_adapter
from framework_table import City, assert_documented, rain


def agent_of(base_url, name="weather", **options):
    return Agent(OpenAIChatCompletionClient(model="m", base_url=base_url, api_key="k"), name=name, **options)


def asynchronous(base_url):
    return agent_of(base_url)


def streaming(base_url):
    async def agent(text):
        return "".join([update.text async for update in agent_of(base_url).run(text, stream=True)])

    return agent


def with_tools(base_url):
    return agent_of(base_url, tools=[rain])


def structured(base_url):
    return agent_of(base_url, default_options={"response_format": City})


def delegating(base_url):
    def agent():
        boss = agent_of(base_url, "boss", tools=[agent_of(base_url, "helper").as_tool()])
        writer = agent_of(base_url, "writer")
        return WorkflowBuilder(start_executor=boss, output_from=[writer]).add_edge(boss, writer).build()

    return agent


def failing(base_url):
    async def agent(text):
        raise LookupError((await agent_of(base_url).run(text)).text)

    return agent


async def test_agents_keep_every_rule_of_an_adapter():
    agents = {"async": asynchronous, "stream": streaming, "tools": with_tools, "structured output": structured}
    agents |= {"nested agents": delegating, "failing": failing}
    checked = {"framework": "Microsoft Agent Framework", "plugin": art_agent_framework}
    names = {"boss", "boss/helper", "writer"}
    assert_documented(await check_adapter(agents, **checked, packages={"agent_framework"}, agent_names=names))


def test_a_workflow_that_rollouts_would_share_is_refused():
    with pytest.raises(AgentError, match=r"keeps its conversation.*def agent\(\): return Workflow"):
        art_agent_framework.adapt_agent(delegating("http://127.0.0.1:1")(), shared=True)
