"""Deep agents, which are compiled LangGraph graphs, keep every rule of an adapter, and their sub-agents have names."""

import json

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI

import art_langgraph
from art_core.testing import check_adapter, scripted_reply
from framework_table import City, assert_documented, rain, threaded, user

RESEARCHER = {"name": "researcher", "description": "Finds things out.", "system_prompt": "You are a researcher."}


def agent_of(base_url, **options):
    return create_deep_agent(ChatOpenAI(model="m", api_key="k", base_url=base_url, max_retries=0), **options)


def text_of(result):
    return result if isinstance(result, str | list) else result["messages"][-1].text


def blocking(base_url):
    return lambda text: text_of(agent_of(base_url).invoke({"messages": user(text)}))


def asynchronous(base_url):
    return agent_of(base_url)


def streaming(base_url):
    async def agent(text):
        messages = agent_of(base_url).astream({"messages": user(text)}, stream_mode="messages")
        return "".join([message.text async for message, _ in messages])

    return agent


def with_tools(base_url):
    return agent_of(base_url, tools=[rain])


def structured(base_url):
    return agent_of(base_url, response_format=City)


def delegating(base_url):
    return agent_of(base_url, subagents=[RESEARCHER])


def failing(base_url):
    async def agent(text):
        raise LookupError(text_of(await agent_of(base_url).ainvoke({"messages": user(text)})))

    return agent


def reply(request):
    """Reply without the tools that every deep agent has, and delegate to the researcher if there is one."""
    own = ("rain", "City", "task" if RESEARCHER["description"] in json.dumps(request.get("tools")) else None)
    tools = [tool for tool in request.get("tools") or () if tool["function"]["name"] in own]
    message = scripted_reply({**request, "tools": tools})
    for call in message.get("tool_calls") or ():
        if call["function"]["name"] == "task":
            arguments = json.loads(call["function"]["arguments"]) | {"subagent_type": RESEARCHER["name"]}
            call["function"]["arguments"] = json.dumps(arguments)
    return message


async def test_agents_keep_every_rule_of_an_adapter():
    agents = {"sync": blocking, "async": asynchronous, "stream": streaming, "tools": with_tools}
    agents |= {"structured output": structured, "threads": threaded(blocking)}
    agents |= {"nested agents": delegating, "failing": failing}
    names, packages = {"model", "tools/researcher/model"}, {"deepagents", "langgraph"}
    checked = {"framework": "Deep Agents", "plugin": art_langgraph, "packages": packages, "agent_names": names}
    assert_documented(await check_adapter(agents, **checked, to_output=text_of, reply=reply))
