"""Agno's agents and teams keep every rule of an adapter."""

import pytest
from agno.agent import Agent
from agno.models.openai import OpenAIChat
from agno.team import Team, TeamMode

import art_agno
from art_core.testing import FakeEngine, check_adapter
from art_core.testing.provider import PlainProvider
from framework_table import City, assert_documented, collected, rain, threaded


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


def cached(base_url, folder, stream):
    model = OpenAIChat(id="m", base_url=base_url, api_key="k", cache_response=True, cache_dir=str(folder))

    async def twice(text):
        for _ in range(2):
            agent = Agent(model=model, telemetry=False)
            if stream:
                *_, result = [event async for event in agent.arun(text, stream=True, yield_run_output=True)]
            else:
                result = await agent.arun(text)
        return answer(result)

    return twice


@pytest.mark.parametrize("stream", [False, True])
async def test_its_cache_neither_answers_nor_keeps_a_call_of_a_rollout(tmp_path, stream):
    agent = cached("http://127.0.0.1:9/v1", tmp_path / "cache", stream)
    trajectories = await collected(tmp_path, agent)
    assert [(each.output, len(each.calls)) for each in trajectories] == [("answer to task-000", 2)] * 2
    assert not (tmp_path / "cache").exists()


async def test_its_cache_answers_outside_rollouts(tmp_path):
    art_agno.redirect_clients()
    provider = PlainProvider(FakeEngine("the provider's"), {})
    with provider.running():
        output = await cached(provider.base_url, tmp_path / "cache", stream=False)("hello")
    assert (output, len(provider.requests)) == ("the provider's", 1)
