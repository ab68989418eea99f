"""Requests that a client never makes: each is refused with a 400, or understood."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from art_core.errors import UpstreamError
from art_gateway import dialects

VALID = {
    "/v1/completions": {"prompt": "Once", "logprobs": 1, "n": 1, "best_of": 1, "max_tokens": 4},
    "/v1/responses": {
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "u"}],
            },
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
            {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "instructions": "a",
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "stream": True,
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "a", "signature": ""},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [], "is_error": True}]},
        ],
        "tools": [{"name": "f", "input_schema": {}}],
        "tool_choice": {"type": "tool", "name": "f"},
        "output_config": {"format": {"type": "json_schema", "schema": {}}, "effort": "low"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "stream": True,
    },
    "/models/{model}:generateContent": {
        "systemInstruction": {"parts": [{"text": "a"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "a"}, {"inlineData": {"mimeType": "image/png", "data": "aaaa"}}]},
            {
                "role": "model",
                "parts": [
                    {"text": "a", "thought": True, "thoughtSignature": "YXJ0Ont9"},
                    {"functionCall": {"id": "c", "name": "f", "args": {"a": 1}}},
                ],
            },
            {"role": "user", "parts": [{"functionResponse": {"id": "c", "name": "f", "response": {"result": 1}}}]},
        ],
        "tools": [
            {
                "functionDeclarations": [
                    {
                        "name": "f",
                        "parameters": {"type": "OBJECT", "properties": {"a": {"type": "STRING", "nullable": True}}},
                    }
                ]
            }
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        "generationConfig": {
            "topK": 4.0,
            "responseMimeType": "application/json",
            "responseSchema": {"type": "OBJECT", "anyOf": [{"type": "STRING", "maxLength": "4"}]},
            "responseModalities": ["TEXT"],
            "thinkingConfig": {"thinkingBudget": 0, "thinkingLevel": "LOW", "includeThoughts": True},
        },
    },
    "/model/{model}/converse": {
        "system": [{"text": "a"}, {"cachePoint": {"type": "default"}}],
        "messages": [
            {
                "role": "user",
                "content": [{"text": "a"}, {"image": {"format": "png", "source": {"bytes": "aaaa"}}}],
            },
            {
                "role": "assistant",
                "content": [
                    {"reasoningContent": {"reasoningText": {"text": "a", "signature": "s"}}},
                    {"toolUse": {"toolUseId": "c", "name": "f", "input": {"a": 1}}},
                ],
            },
            {
                "role": "user",
                "content": [{"toolResult": {"toolUseId": "c", "content": [{"json": {"a": 1}}], "status": "error"}}],
            },
        ],
        "inferenceConfig": {"maxTokens": 4, "temperature": 0.5, "topP": 0.9, "stopSequences": ["x"]},
        "toolConfig": {
            "tools": [{"toolSpec": {"name": "f", "inputSchema": {"json": {}}}}, {"cachePoint": {"type": "default"}}],
            "toolChoice": {"tool": {"name": "f"}},
        },
        "outputConfig": {
            "textFormat": {"type": "json_schema", "structure": {"jsonSchema": {"schema": "{}", "name": "n"}}},
            "effort": "low",
        },
        "additionalModelRequestFields": {"thinking": {"type": "enabled"}, "top_k": 3},
    },
    "/model/{model}/invoke": {
        "anthropic_version": "bedrock-2023-05-31",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 9,
    },
    "/api/chat": {
        "model": "m",
        "messages": [
            {"role": "user", "content": "a", "images": ["aaaa"]},
            {
                "role": "assistant",
                "content": "",
                "thinking": "a",
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}],
            },
            {"role": "tool", "tool_name": "f", "content": "x"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "format": {"type": "object"},
        "options": {"num_predict": -1, "num_ctx": 8, "repeat_penalty": 1.1, "stop": ["a"]},
        "think": "low",
        "stream": True,
    },
}
JUNK = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just([]) | st.just({}) | st.just([{}])


def places(value, path=()):
    """Yield where something stands in a JSON value."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


@pytest.mark.parametrize("path", VALID)
@settings(deadline=None)
@given(data=st.data())
def test_a_malformed_request_is_refused_and_breaks_nothing(path, data):
    body = json.loads(json.dumps(VALID[path]))
    dialects()[path].to_chat(body)
    *way, last = data.draw(st.sampled_from(list(places(body))))
    holder = body
    for key in way:
        holder = holder[key]
    holder[last] = data.draw(JUNK)
    try:
        request = dialects()[path].to_chat(body)
    except UpstreamError as refusal:
        assert refusal.status == 400
    else:
        # An empty one is refused by whoever translates it.
        assert isinstance(request.get("messages", request.get("prompt")), list | str)
