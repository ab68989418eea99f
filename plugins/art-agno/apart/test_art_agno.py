"""Agno's agents and teams keep every rule of an adapter."""

from agno.agent import Agent
from agno.models.openai import OpenAIChat
from agno.team import Team, TeamMode

import art_agno
from art_core.testing import check_adapter
from framework_table import City, assert_documented, rain, threaded


def agent_of(base_url, name="weather", kind=Agent, **options):
    return kind(name=name, model=OpenAIChat(id="m", base_url=base_url, api_key="k"), telemetry=False, **options)


def answer(result):
    if result.status == "ERROR":
        raise RuntimeError(result.content)
    return result.content


def blocking(base_url):
    return lambda text: answer(agent_of(base_url).run(text))


def asynchronous(base_url):
    return agent_of(base_url)


def streaming(base_url):
    async def agent(text):
        *_, result = [event async for event in agent_of(base_url).arun(text, stream=True, yield_run_output=True)]
        return answer(result)

    return agent


def with_tools(base_url):
    return agent_of(base_url, tools=[rain])


def structured(base_url):
    async def agent(text):
        return answer(await agent_of(base_url, output_schema=City).arun(text)).city

    return agent


def delegating(base_url):
    return agent_of(base_url, "boss", Team, members=[agent_of(base_url, "helper")], mode=TeamMode.broadcast)


def failing(base_url):
    async def agent(text):
        raise LookupError(answer(await agent_of(base_url).arun(text)))

    return agent


async def test_agents_keep_every_rule_of_an_adapter():
    agents = {"sync": blocking, "async": asynchronous, "stream": streaming, "tools": with_tools}
    agents |= {"structured output": structured, "threads": threaded(blocking)}
    agents |= {"nested agents": delegating, "failing": failing}
    names = {"boss", "boss/helper"}
    checked = {"framework": "Agno", "plugin": art_agno, "packages": {"agno"}, "agent_names": names}
    assert_documented(await check_adapter(agents, **checked))
