"""Strands' agents keep every rule of an adapter."""

import pytest
import strands
from strands.models.openai import OpenAIModel

import art_strands
from art_core.errors import AgentError
from art_core.testing import check_adapter
from framework_table import assert_documented, rain


def agent_of(base_url, name="weather", tools=()):
    model = OpenAIModel(client_args={"base_url": base_url, "api_key": "k"}, model_id="m")
    return strands.Agent(model=model, name=name, tools=list(tools), callback_handler=None)


def blocking(base_url):
    return lambda text: str(agent_of(base_url)(text))


def asynchronous(base_url):
    return lambda: agent_of(base_url)


def streaming(base_url):
    async def agent(text):
        return "".join([event.get("data", "") async for event in agent_of(base_url).stream_async(text)])

    return agent


def with_tools(base_url):
    return lambda: agent_of(base_url, tools=[strands.tool(rain)])


def delegating(base_url):
    def agent():
        helper = agent_of(base_url, "helper")

        @strands.tool
        async def ask(city: str) -> str:
            """Ask the helper."""
            return str(await helper.invoke_async(f"{city}?"))

        return agent_of(base_url, "boss", [ask])

    return agent


def failing(base_url):
    async def agent(text):
        raise LookupError(await agent_of(base_url).invoke_async(text))

    return agent


async def test_agents_keep_every_rule_of_an_adapter():
    agents = {"sync": blocking, "async": asynchronous, "stream": streaming, "tools": with_tools}
    agents |= {"nested agents": delegating, "failing": failing}
    names = {"boss", "boss/helper"}
    checked = {"framework": "Strands", "plugin": art_strands, "packages": {"strands"}, "agent_names": names}
    assert_documented(await check_adapter(agents, **checked))


def test_an_agent_that_rollouts_would_share_is_refused():
    with pytest.raises(AgentError, match=r"keeps its conversation.*def agent\(\): return Agent"):
        art_strands.adapt_agent(agent_of("http://127.0.0.1:1"), shared=True)
