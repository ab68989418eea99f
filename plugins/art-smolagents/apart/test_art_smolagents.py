"""Agents of smolagents keep every rule of an adapter."""

import json

import pytest
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent

import art_smolagents
from art_core.errors import AgentError
from art_core.testing import check_adapter
from art_core.testing.provider import marks, scripted_reply
from framework_table import assert_documented, threaded


def agent_of(base_url, kind=ToolCallingAgent, **settings):
    model = OpenAIModel(model_id="m", api_base=base_url, api_key="k")
    return kind(tools=[], model=model, verbosity_level=0, **settings)


def blocking(base_url):
    return lambda: agent_of(base_url)


def asking(base_url):
    return lambda text: agent_of(base_url).run(text)


def streaming(base_url):
    return lambda: agent_of(base_url, stream_outputs=True)


def managing(kind, **settings):
    def make(base_url):
        def agent():
            helper = agent_of(base_url, name="helper", description="Helps.")
            return agent_of(base_url, kind, name="boss", managed_agents=[helper], **settings)

        return agent

    return make


def failing(base_url):
    def agent(text):
        raise LookupError(agent_of(base_url).run(text))

    return agent


def reply(request):
    """Ask the managed agent before the final answer, whose tool smolagents lists first and whose calls it shows as texts."""
    answer = scripted_reply(request)
    if "helper" not in str(request["messages"][0]):
        return answer
    if request.get("response_format"):
        [mark] = marks(request["messages"])
        return {"content": json.dumps({"thought": mark, "code": f"final_answer(helper({mark!r}))"})}
    name = "final_answer" if "'name': 'helper'" in str(request["messages"]) else "helper"
    return scripted_reply(request | {"tool_choice": {"function": {"name": name}}})


async def test_agents_keep_every_rule_of_an_adapter():
    coding = managing(CodeAgent, use_structured_outputs_internally=True)
    agents = {"sync": blocking, "stream": streaming, "structured output": coding, "threads": threaded(asking)}
    agents |= {"nested agents": managing(ToolCallingAgent), "failing": failing}
    names = {"boss", "boss/helper"}
    checked = {"framework": "smolagents", "plugin": art_smolagents, "packages": {"smolagents"}, "agent_names": names}
    assert_documented(await check_adapter(agents, reply=reply, **checked))


def test_an_agent_that_rollouts_would_share_is_refused():
    with pytest.raises(AgentError, match=r"keeps its conversation.*def agent\(\): return ToolCallingAgent"):
        art_smolagents.adapt_agent(agent_of("http://127.0.0.1:1"), shared=True)
