"""AutoGen's agents and teams keep every rule of an adapter."""

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

import art_autogen
from art_core.errors import AgentError
from art_core.testing import check_adapter
from framework_table import City, assert_documented, rain

INFO = ModelInfo(vision=False, function_calling=True, json_output=True, structured_output=True, family="unknown")


def agent_of(base_url, name="weather", **options):
    client = OpenAIChatCompletionClient(model="m", model_info=INFO, base_url=base_url, api_key="k")
    return AssistantAgent(name, model_client=client, **options)


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
