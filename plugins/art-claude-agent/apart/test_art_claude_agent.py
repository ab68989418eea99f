"""Agents of the Claude Agent SDK, with its own Claude Code as the child process, keep every rule of an adapter."""

import asyncio
from dataclasses import replace

import pytest
from claude_agent_sdk import (
    ClaudeAgentOptions,
    ClaudeSDKClient,
    ResultMessage,
    StreamEvent,
    create_sdk_mcp_server,
    query,
    tool,
)

import art_claude_agent
from art_core.testing import check_adapter, scripted_reply
from framework_table import City, assert_documented, check_programs, failing, threaded

MINIMAL = ClaudeAgentOptions(system_prompt="Answer briefly.", tools=[], setting_sources=[])


@tool("rain", "Tell the weather.", {"city": str})
async def rain(arguments):
    return {"content": [{"type": "text", "text": f"rain in {arguments['city']}"}]}


def options_of(base_url, **changed):
    env = {
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": "k",
        # As in a rollout, so that the calls can be compared.
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }
    return replace(MINIMAL, env=env, **changed)


def with_tools(base_url):
    servers = {"weather": create_sdk_mcp_server("weather", tools=[rain])}
    return options_of(base_url, mcp_servers=servers, allowed_tools=["mcp__weather__rain"])


def asynchronous(base_url):
    async def agent(text):
        async with ClaudeSDKClient(options_of(base_url)) as client:
            await client.query(text)
            (result,) = [m async for m in client.receive_response() if isinstance(m, ResultMessage)]
        if result.is_error:
            raise RuntimeError(result.result)
        return result.result

    return agent


def blocking(base_url):
    return lambda text: asyncio.run(asynchronous(base_url)(text))


def streaming(base_url):
    async def agent(text):
        messages = query(prompt=text, options=options_of(base_url, include_partial_messages=True))
        deltas = [message.event.get("delta", {}) async for message in messages if isinstance(message, StreamEvent)]
        return "".join(delta.get("text", "") for delta in deltas)

    return agent


def delegating(base_url):
    helper = options_of(base_url)

    @tool("ask", "Ask the helper.", {"city": str})
    async def ask(arguments):
        messages = query(prompt=f"{arguments['city']}?", options=helper)
        (result,) = [message.result async for message in messages if isinstance(message, ResultMessage)]
        return {"content": [{"type": "text", "text": result}]}

    servers = {"helpers": create_sdk_mcp_server("helpers", tools=[ask])}
    return options_of(base_url, mcp_servers=servers, allowed_tools=["mcp__helpers__ask"])


def structured(base_url):
    return options_of(base_url, output_format={"type": "json_schema", "schema": City.model_json_schema()})


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """Claude Code keeps its sessions here."""
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(tmp_path / "claude"))


@pytest.mark.timeout(600)
async def test_agents_keep_every_rule_of_an_adapter():
    agents = {"sync": blocking, "async": asynchronous, "stream": streaming, "tools": with_tools}
    agents |= {"threads": threaded(blocking), "nested agents": delegating, "failing": failing(asynchronous)}
    checked = {"framework": "Claude Agent SDK", "plugin": art_claude_agent, "packages": {"claude_agent_sdk"}}
    assert_documented(await check_programs(agents, **checked, agent_names={"main"}))


async def test_default_options_with_all_their_tools_are_answered(tmp_path):
    def default(base_url):
        return ClaudeAgentOptions(env=options_of(base_url).env, cwd=tmp_path)

    checked = {"framework": "Claude Agent SDK", "plugin": art_claude_agent, "runs": 2}
    await check_adapter(default, **checked, reply=lambda request: scripted_reply({**request, "tools": None}))


async def test_structured_output_is_the_output():
    """Claude Code asks for it with a tool that it doesn't force."""
    checked = {"framework": "Claude Agent SDK", "plugin": art_claude_agent, "runs": 2}
    await check_adapter(structured, **checked, to_output=lambda output: output["city"])
