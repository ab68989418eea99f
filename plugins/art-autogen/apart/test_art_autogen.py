"""AutoGen's agents and teams keep every rule of an adapter."""

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core.models import ModelInfo
from autogen_ext.models.cache import ChatCompletionCache
from autogen_ext.models.openai import OpenAIChatCompletionClient

import art_autogen
from art_core.errors import AgentError
from art_core.testing import FakeEngine, check_adapter
from art_core.testing.provider import PlainProvider
from framework_table import City, assert_documented, collected, rain

INFO = ModelInfo(vision=False, function_calling=True, json_output=True, structured_output=True, family="unknown")


def client_at(base_url):
    return OpenAIChatCompletionClient(model="m", model_info=INFO, base_url=base_url, api_key="k")


def agent_of(base_url, name="weather", **options):
    return AssistantAgent(name, model_client=client_at(base_url), **options)


def asynchronous(base_url):
    return lambda: agent_of(base_url)


def streaming(base_url):
    return lambda: agent_of(base_url, model_client_stream=True)


def with_tools(base_url):
    return lambda: agent_of(base_url, tools=[rain], max_tool_iterations=3)


def structured(base_url):
    return lambda: agent_of(base_url, output_content_type=City)


def delegating(base_url):
    def agent():
        ask = AgentTool(agent_of(base_url, "helper"), return_value_as_last_message=True)
        boss = agent_of(base_url, "boss", tools=[ask], max_tool_iterations=3)
        # The task, what the boss asks and is told, the boss's answer, and the writer's.
        ending = MaxMessageTermination(5)
        return RoundRobinGroupChat([boss, agent_of(base_url, "writer")], termination_condition=ending)

    return agent


def failing(base_url):
    async def agent(text):
        raise LookupError((await agent_of(base_url).run(task=text)).messages[-1].content)

    return agent


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # of the OpenAI client's parsed answers
async def test_agents_keep_every_rule_of_an_adapter():
    agents = {"async": asynchronous, "stream": streaming, "tools": with_tools, "structured output": structured}
    agents |= {"nested agents": delegating, "failing": failing}
    names = {"boss", "boss/helper", "writer"}
    checked = {"framework": "AutoGen", "plugin": art_autogen, "packages": {"autogen_agentchat"}, "agent_names": names}
    assert_documented(await check_adapter(agents, **checked))


def test_an_agent_that_rollouts_would_share_is_refused():
    with pytest.raises(AgentError, match=r"keeps its conversation.*def agent\(\): return AssistantAgent"):
        art_autogen.adapt_agent(agent_of("http://127.0.0.1:1"), shared=True)


def cached(base_url, stream):
    client = ChatCompletionCache(client_at(base_url))

    async def twice(text):
        for _ in range(2):
            agent = AssistantAgent("weather", client, model_client_stream=stream)
            result = await agent.run(task=text)
        return result.messages[-1].content

    return twice, client.store


@pytest.mark.parametrize("stream", [False, True])
async def test_its_cache_neither_answers_nor_keeps_a_call_of_a_rollout(tmp_path, stream):
    agent, store = cached("http://127.0.0.1:9/v1", stream)
    trajectories = await collected(tmp_path, agent)
    assert [(each.output, len(each.calls)) for each in trajectories] == [("answer to task-000", 2)] * 2
    assert not store.store


async def test_its_cache_answers_outside_rollouts():
    art_autogen.redirect_clients()
    provider = PlainProvider(FakeEngine("the provider's"), {})
    with provider.running():
        output = await cached(provider.base_url, stream=False)[0]("hello")
    assert (output, len(provider.requests)) == ("the provider's", 1)
