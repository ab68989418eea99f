"""An agent of the Claude Agent SDK with a tool of an MCP server and a sub-agent is trained as it is."""

import itertools
import json

from claude_agent_sdk import AgentDefinition, ClaudeAgentOptions, create_sdk_mcp_server, tool

from scripted_training import call_of, two_steps

RAIN = "mcp__weather__rain"
ENDINGS = itertools.count()


@tool("rain", "Tell the weather.", {"city": str})
async def rain(arguments):
    return {"content": [{"type": "text", "text": f"rain in {arguments['city']}"}]}


def reply(request):
    """The agent asks its scout, the scout the tool; answers differ, so that there is something to learn."""
    if "stop-condition" in str(request["messages"][0]):
        return {"content": '{"ok": true}'}
    offered = {tool["function"]["name"] for tool in request.get("tools", ())}
    if any(message["role"] == "tool" for message in request["messages"]):
        return {"content": "It rains" + " a lot" * next(ENDINGS)}
    if "Agent" in offered:
        return call_of("Agent", description="weather", prompt="Weather in Rome?", subagent_type="scout")
    return call_of(RAIN, city="Rome")


def test_two_steps_train_the_agent_and_its_sub_agent_but_no_side_calls(tmp_path, monkeypatch):
    elsewhere = {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "CLAUDE_CODE_USE_BEDROCK": "1"}
    side_call = {"type": "prompt", "prompt": "Is the answer complete?"}
    settings = {"env": elsewhere, "hooks": {"Stop": [{"hooks": [side_call]}]}}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path))
    scout = AgentDefinition(description="Tells the weather.", prompt="You tell the weather.", tools=[RAIN])
    agent = ClaudeAgentOptions(
        system_prompt="Answer briefly.",
        tools=["Agent"],
        agents={"scout": scout},
        setting_sources=["user"],
        mcp_servers={"weather": create_sdk_mcp_server("weather", tools=[rain])},
        allowed_tools=[RAIN, "Agent"],
        cwd=tmp_path,
        env={"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1", **elsewhere},
    )
    nodes = {"train_nodes": ["main", "subagent"], "other_nodes": "policy"}
    rollouts = two_steps(agent, "Weather in Rome?", reply, tmp_path / "run", reward=lambda it: len(it.output), **nodes)
    callers = ["main", "subagent", "subagent", "main", "auxiliary"]
    assert [[call.agent for call in it.calls] for it in rollouts] == [callers] * 4
    assert all("rain in Rome" in str(it.calls[2].request["messages"]) for it in rollouts)
