"""A history in another provider's form reaches the policy as a chat completion says it."""

import json

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

import art_langchain
import art_openai

art_openai.redirect_clients()
art_langchain.redirect_clients()

CLAUDE = ChatAnthropic(model="claude-sonnet-4-6", api_key="agent", base_url="http://127.0.0.1:9")


def test_anthropics_content_blocks_become_openais(stub):
    history = [
        SystemMessage([{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]),
        HumanMessage(
            [
                {"type": "text", "text": "what is this?"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
            ]
        ),
        AIMessage(
            [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
            ]
        ),
        HumanMessage(
            [
                {"type": "tool_result", "tool_use_id": "t1", "content": "rain"},
                {"type": "text", "text": "and?"},
            ]
        ),
    ]
    with stub.rollout():
        CLAUDE.invoke(history)
    system, question, called, *rest = stub.of("r")[0].body["messages"]
    assert system == {"role": "system", "content": "be brief"}
    assert question["content"][1] == {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert called["content"] == "let me see"
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    assert [(message["role"], message["content"]) for message in rest] == [("tool", "rain"), ("user", "and?")]


def test_a_tool_call_that_was_no_json_comes_back_as_it_was_sampled(stub):
    broken = {"name": "weather", "args": "{oops", "id": "t1", "error": None, "type": "invalid_tool_call"}
    for content in ("", [{"type": "text", "text": "so"}]):
        with stub.rollout():
            CLAUDE.invoke([HumanMessage("hello"), AIMessage(content, invalid_tool_calls=[broken])])
    for asked in stub.of("r"):
        assert asked.body["messages"][1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{oops"}
