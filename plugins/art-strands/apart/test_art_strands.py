"""Strands' agents keep every rule of an adapter, with a model of OpenAI and with Strands' own default, one of Bedrock."""

import functools

import pytest
import strands
from strands.models import BedrockModel
from strands.models.openai import OpenAIModel
from strands.multiagent import GraphBuilder, Swarm

import art_strands
from art_core.errors import AgentError
from art_core.testing import check_adapter
from framework_table import City, assert_documented, collected, rain


def openai(base_url):
    return OpenAIModel(client_args={"base_url": base_url, "api_key": "k"}, model_id="m")


@functools.cache  # a client of boto3 takes a tenth of a second, and may be shared
def bedrock(base_url):
    return BedrockModel(region_name="us-east-1", endpoint_url=base_url)


def agent_of(model, name="weather", tools=()):
    return strands.Agent(model=model, name=name, tools=list(tools), callback_handler=None)


def blocking(model_at, base_url):
    return lambda text: str(agent_of(model_at(base_url))(text))


def asynchronous(model_at, base_url):
    return lambda: agent_of(model_at(base_url))


def streaming(model_at, base_url):
    async def agent(text):
        return "".join([event.get("data", "") async for event in agent_of(model_at(base_url)).stream_async(text)])

    return agent


def with_tools(model_at, base_url):
    return lambda: agent_of(model_at(base_url), tools=[strands.tool(rain)])


def structured(model_at, base_url):
    async def agent(text):
        return await agent_of(model_at(base_url)).structured_output_async(City, text)

    return agent


def delegating(model_at, base_url):
    def agent():
        model = model_at(base_url)
        helper = agent_of(model, "helper")

        @strands.tool
        async def ask(city: str) -> str:
            """Ask the helper."""
            return str(await helper.invoke_async(f"{city}?"))

        return agent_of(model, "boss", [ask])

    return agent


def failing(model_at, base_url):
    async def agent(text):
        raise LookupError(await agent_of(model_at(base_url)).invoke_async(text))

    return agent


KINDS = {
    "sync": blocking,
    "async": asynchronous,
    "stream": streaming,
    "tools": with_tools,
    "structured output": structured,
    "nested agents": delegating,
    "failing": failing,
}


# Without it Strands only offers the schema as a tool at first, and asks for it once the model has answered otherwise.
@pytest.mark.filterwarnings("ignore:Agent.structured_output_async method is deprecated:DeprecationWarning")
@pytest.mark.parametrize("framework, model_at", [("Strands", openai), ("Strands, Bedrock", bedrock)])
async def test_agents_keep_every_rule_of_an_adapter(framework, model_at):
    agents = {kind: functools.partial(make, model_at) for kind, make in KINDS.items()}
    names = {"boss", "boss/helper"}
    checked = {"framework": framework, "plugin": art_strands, "packages": {"strands"}, "agent_names": names}
    assert_documented(await check_adapter(agents, **checked))


def graph_of(model):
    builder = GraphBuilder()
    builder.add_node(agent_of(model, "writer"), "write")
    builder.set_max_node_executions(3)
    return builder.build()


def swarm_of(model):
    return Swarm([agent_of(model, "writer")])


@pytest.mark.parametrize(("make", "node"), [(graph_of, "write"), (swarm_of, "writer")])
async def test_the_output_of_several_agents_is_their_text(tmp_path, make, node):
    trajectories = await collected(tmp_path, lambda: make(openai("http://127.0.0.1:9/v1")))
    assert [trajectory.output for trajectory in trajectories] == [f"{node}: answer to task-000"] * 2
    assert {call.agent for trajectory in trajectories for call in trajectory.calls} == {"writer"}


@pytest.mark.parametrize(("make", "kind"), [(agent_of, "Agent"), (graph_of, "Graph"), (swarm_of, "Swarm")])
def test_an_agent_that_rollouts_would_share_is_refused(make, kind):
    with pytest.raises(AgentError, match=rf"keeps its conversation.*def agent\(\): return {kind}"):
        art_strands.adapt_agent(make(openai("http://127.0.0.1:1")), shared=True)
