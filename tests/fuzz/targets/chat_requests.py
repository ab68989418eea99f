"""What a client asks, in every dialect -> an error of the dialect's own, or an answer and its calls (``capture.server``)."""

from __future__ import annotations

import json
from typing import Any

import orjson

from art_core.store.values import from_json, request_to_json
from art_gateway import dialects
from fuzz.choices import Choices, changed, spelled, written
from fuzz.policy import SAID, Policy
from fuzz.serving import Reply, ask, check_error, run

TOOL = {
    "type": "function",
    "function": {
        "name": "f", "description": "d", "strict": False,
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": ["a"],
                       "additionalProperties": False},
    },
}  # fmt: skip
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {
        "model": "gpt", "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALLED], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c", "content": "b"}, {"role": "developer", "content": "", "name": "n"},
        ],
        "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True,
    }),
    ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "a"}], "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3,
        "seed": 1, "stop": ["x"],
        "max_tokens": 4, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 1,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False}, "frequency_penalty": 0, "logit_bias": {}, "user": "u",
    }),
    ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "a"}], "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }),
    ("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "a"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {
            "type": "object", "properties": {"a": {"type": ["integer", "null"], "minimum": 1}}, "required": ["a"],
            "additionalProperties": False, "$defs": {"d": {"pattern": "^a+$", "maxLength": 3}}}}},
    }),
    ("/v1/chat/completions", {"prompt": "Once", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL], "tool_choice": {
        "type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function",
        "function": {"name": "f"}}]}}}),
    ("/v1/completions", {"prompt": [1, 2], "logprobs": 1, "n": 1, "best_of": 1, "max_tokens": 4, "stop": "a",
    "echo": False}),
    ("/v1/responses", {
        "model": "gpt", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": "x"},
        ],
        "instructions": "a", "tools": [{"type": "function", "name": "f", "parameters": {}}], "metadata": {"a": "b"},
        "store": True,
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}, "verbosity": "low"},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 9,
        "parallel_tool_calls": False,
    }),
    ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": "f", "parameters": {}}],
                       "tool_choice": {"type": "function", "name": "f"}}),
    ("/v1/messages", {
        "model": "claude", "max_tokens": 9, "system": [{"type": "text", "text": "a"}], "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "a", "signature": ""},
                                              {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text",
            "text": "b"}],
                                          "is_error": True}, {"type": "text", "text": "c"}]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any",
        "disable_parallel_tool_use": True},
        "output_config": {"effort": "low"}, "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["x"],
    }),
    ("/models/m:generateContent", {
        "contents": [
            {"role": "user", "parts": [{"text": "a"}]},
            {"role": "model", "parts": [{"text": "b", "thought": True}, {"functionCall": {"id": "c", "name": "f",
            "args": {"a": 1}}}]},
            {"role": "user", "parts": [{"functionResponse": {"id": "c", "name": "f", "response": {"result": 1}}}]},
        ],
        "systemInstruction": {"parts": [{"text": "s"}]},
        "tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT", "properties": {
            "a": {"type": "STRING", "nullable": True}}}}]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        "generationConfig": {"topK": 4.0, "maxOutputTokens": 4, "stopSequences": ["x"],
                             "thinkingConfig": {"thinkingBudget": 0, "includeThoughts": True}},
    }),
    ("/models/m:generateContent", {
        "contents": [{"parts": [{"text": "a"}]}],
        "generationConfig": {"responseMimeType": "application/json", "responseSchema": {"type": "OBJECT", "anyOf": [
            {"type": "STRING", "maxLength": "4"}]}},
    }),
    ("/api/chat", {
        "model": "m", "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "thinking": "a", "tool_calls": [{"function": {"name": "f",
            "arguments": {"a": 1}}}]},
            {"role": "tool", "tool_name": "f", "content": "x"},
        ],
        "tools": [TOOL], "format": {"type": "object"}, "think": "low",
        "options": {"num_predict": -1, "num_ctx": 8, "repeat_penalty": 1.1, "stop": ["a"], "temperature": 0.5},
    }),
    ("/model/m/converse", {
        "system": [{"text": "s"}, {"cachePoint": {"type": "default"}}],
        "messages": [
            {"role": "user", "content": [{"text": "a"}]},
            {"role": "assistant", "content": [
                {"reasoningContent": {"reasoningText": {"text": "a", "signature": ""}}},
                {"toolUse": {"toolUseId": "c", "name": "f", "input": {"a": 1}}}]},
            {"role": "user", "content": [{"toolResult": {"toolUseId": "c", "content": [{"json": {"b": 1}}, {"text": "c"}],
                                                         "status": "error"}}]},
        ],
        "inferenceConfig": {"maxTokens": 4, "topP": 0.9, "stopSequences": ["x"]},
        "toolConfig": {"tools": [{"toolSpec": {"name": "f", "inputSchema": {"json": {"type": "object"}}}}],
                       "toolChoice": {"any": {}}},
        "additionalModelRequestFields": {"thinking": {"type": "enabled"}, "top_k": 3}, "requestMetadata": {"a": "b"},
    }),
    ("/model/m/converse", {
        "messages": [{"role": "user", "content": [{"text": "a"}]}],
        "outputConfig": {"textFormat": {"type": "json_schema", "structure": {"jsonSchema": {"schema": "{}"}}},
                         "effort": "low"},
    }),
    ("/model/m/invoke", {"anthropic_version": "bedrock-2023-05-31", "max_tokens": 9,
                         "messages": [{"role": "user", "content": "a"}]}),
)  # fmt: skip
PIECES = ('{"messages":', '[{"role":"user","content":"a"}]', "}", '"stream":true', ",", "é", "\ud83d",
'{"prompt":"a"}', "[" * 300, "NaN",
          "\xff", "1e999", "9" * 400, '"\\ud800"', '{"model":')  # fmt: skip
STREAMS = {"/model/m/converse": "-stream", "/model/m/invoke": "-with-response-stream"}
SEEDS = [
    *(bytes([kind, 0]) for kind in range(len(ASKED))),
    b"\xff\x00" + bytes([128, 129, 132, 131, 130]),
    b"\xff\x07" + bytes([135]),
]


def one_input(data: bytes) -> None:
    choices = Choices(data)
    kind = choices.byte()
    if kind > 200:
        path = ASKED[choices.below(len(ASKED))][0]
        asked = [(path, spelled(choices.rest(), PIECES).encode(errors="surrogatepass"))]
    else:
        path, good = ASKED[kind % len(ASKED)]
        asked = _whole_and_streamed(path, changed(good, choices))
    replies = [run(ask(Policy(), path, body, dialects=dialects())) for path, body in asked]
    for (_, body), reply in zip(asked, replies, strict=True):
        _check(path, body, reply)
    if len(replies) == 2:
        whole, stream = replies
        assert (whole.status == 200) == (stream.status == 200 and not _failed(path, stream)), (
            "a stream is refused as a whole is"
        )
        assert [_plain(call) for call in whole.calls] == [_plain(call) for call in stream.calls], "and recorded as one"


def _whole_and_streamed(path: str, body: Any) -> list[tuple[str, bytes]]:
    if path.startswith("/models/"):
        return [(path, written(body)), (path.replace(":generate", ":streamGenerate"), written(body))]
    if path.startswith("/model/"):
        return [(path, written(body)), (path + STREAMS[path], written(body))]
    if not isinstance(body, dict):
        return [(path, written(body))]
    return [(path, written({**body, "stream": stream})) for stream in (False, True)]


def _check(path: str, body: bytes, reply: Reply) -> None:
    assert reply.status in (200, 400), (reply.status, reply.body[:300])
    if reply.status == 400 or _failed(path, reply):
        assert not reply.calls
        told = json.loads(reply.body) if reply.status == 400 else reply.events()[-1]
        if path.startswith("/model/"):
            assert told["message"] and (reply.status != 400 or told["__type"] == "ValidationException")
            return
        error = told["error"]
        if path == "/v1/messages":
            assert told["type"] == "error" and error["type"] == "invalid_request_error" and error["message"]
        elif path == "/api/chat":
            assert isinstance(error, str) and error
        elif path.startswith("/models/"):
            assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT") and error["message"]
        else:
            check_error(told)
        return
    asked = orjson.loads(body)
    assert reply.calls, "what is answered is recorded"
    assert [call.choice for call in reply.calls] == list(range(len(reply.calls)))
    assert len({call.request_id for call in reply.calls}) == 1
    for call in reply.calls:
        assert (call.sampled_ids, call.logprobs, call.policy_version) == ((5, 6), (-0.5, -1.0), 3)
        assert call.temperature == 1.0 and call.request["temperature"] == 1.0, "the run's own temperature"
        assert call.finish_reason in ("stop", "tool_calls") and call.prompt_ids
        assert from_json(request_to_json(call.request)) == call.request, "what is stored comes back as it was"
    if path == "/v1/chat/completions":
        _check_chat(asked, reply)
    else:
        told = json.dumps(reply.events()) if reply.framed else reply.body.decode()
        assert SAID in told or '"f"' in told or reply.calls[0].response.get("tool_calls")


def _check_chat(asked: dict[str, Any], reply: Reply) -> None:
    told = reply.events() if reply.stream else [json.loads(reply.body)]
    [call, *_] = reply.calls
    assert {each["id"] for each in told} == {f"chatcmpl-{call.request_id}"}, "who has the answer can find its calls"
    shown = [choice.get("message") or choice["delta"] for each in told for choice in each["choices"]]
    assert [it["content"] for it in shown] == [each.response["content"] for each in reply.calls]
    assert call.request.get("messages") == asked.get("messages") and call.request.get("prompt") == asked.get("prompt")
    assert call.request.get("tools") == asked.get("tools")
    assert not {"token_ids", "token_logprobs", "prompt_token_ids", "policy_version"} & {
        key for it in told for key in _keys(it)
    }


def _keys(told: dict[str, Any]) -> set[str]:
    return {*told, *(key for choice in told["choices"] for key in choice)}


def _failed(path: str, reply: Reply) -> bool:
    return reply.stream and (b'"error"' in reply.body or b"Exception" in reply.body) and not reply.calls


def _plain(call: Any) -> Any:
    response = {**call.response, "content": call.response.get("content")}
    return {**vars(call), "request_id": "", "request": "", "response": response}
