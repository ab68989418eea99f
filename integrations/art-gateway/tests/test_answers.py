"""Providers' answers are read as they really come: parallel calls, thinking, server tools, errors, streams that break off."""

import json

import pytest

from art_gateway.answers import read_answer, usage_of

CHAT, RESPONSES, MESSAGES, GEMINI = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/models/{model}:generateContent",
)
F, G = ({"name": name, "arguments": '{"a": 1}'} for name in "fg")


def read(path, *events, sse=False):
    """Read one whole answer, or the events of a stream."""
    if not sse:
        return read_answer(path, json.dumps(events[0]).encode())
    lines = (f"event: {event.get('type', 'chunk')}\ndata: {json.dumps(event)}\n\n" for event in events)
    return read_answer(path, "".join(lines).encode())


def said(answer, index=0):
    """Return content, reasoning, and the names and arguments of tool calls."""
    message = answer.choices[index].message()
    calls = [tuple(call["function"].values()) for call in message.get("tool_calls", ())]
    return message["content"], message.get("reasoning_content"), calls


CALLS = [("f", '{"a": 1}'), ("g", '{"a": 1}')]


def whole_chat(message, finish="stop"):
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def test_parallel_calls_of_a_whole_answer_stay_apart():
    calls = [{"id": "1", "type": "function", "function": F}, {"id": "2", "type": "function", "function": G}]
    answer = read(CHAT, whole_chat({"role": "assistant", "content": None, "tool_calls": calls}, "tool_calls"))
    assert said(answer) == (None, None, CALLS)
    assert answer.choices[0].finish == "tool_calls" and answer.ended


def test_custom_calls_content_in_parts_and_refusals_are_text():
    custom = {"id": "1", "type": "custom", "custom": {"name": "sql", "input": "SELECT 1"}}
    assert said(read(CHAT, whole_chat({"content": None, "tool_calls": [custom]})))[2] == [("sql", "SELECT 1")]
    assert (
        said(read(CHAT, whole_chat({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})))[0]
        == "ab"
    )
    assert said(read(CHAT, whole_chat({"content": None, "refusal": "no"})))[0] == "no"


def test_a_chat_stream_with_several_choices_and_calls_by_index():
    def called(index, **function):
        return {"choices": [{"index": 1, "delta": {"tool_calls": [{"index": index, "function": function}]}}]}

    chunks = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "a"}}]},
        called(0, name="f", arguments='{"a"'),
        called(0, arguments=": 1}"),
        called(1, **G),
        {"choices": [{"index": 0, "delta": {"content": "b"}, "finish_reason": "length"}]},
        {"choices": [{"index": 1, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
    ]  # fmt: skip
    answer = read(CHAT, *chunks, sse=True)
    assert (said(answer, 0), said(answer, 1)) == (("ab", None, []), (None, None, CALLS))
    assert [choice.finish for choice in answer.choices.values()] == ["length", "tool_calls"]
    assert answer.usage == {"prompt_tokens": 5, "completion_tokens": 2} and answer.ended
    assert not read(CHAT, *chunks[:5], sse=True).ended


def test_what_a_responses_answer_says_beside_servers_tools():
    output = [
        {"type": "reasoning", "summary": [], "encrypted_content": "xyz"},
        {"type": "web_search_call", "id": "ws", "status": "completed"},
        {"type": "message", "content": [{"type": "output_text", "text": "Looking. ", "annotations": []}]},
        {"type": "message", "content": [{"type": "output_text", "text": "Found."}]},
        {"type": "function_call", "call_id": "1", **F},
        {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": '{"a": 1}'},
    ]
    usage = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 3}
    response = {"object": "response", "status": "completed", "output": output, "usage": usage}
    answer = read(RESPONSES, response)
    assert said(answer) == ("Looking. Found.", None, CALLS)
    assert answer.usage == {"prompt_tokens": 9, "completion_tokens": 3, "cached_tokens": 4}
    streamed = read(RESPONSES, {"type": "response.completed", "response": response}, sse=True)
    assert said(streamed) == said(answer) and streamed.ended and streamed.choices[0].finish == "tool_calls"


def test_a_responses_stream_that_breaks_off_keeps_its_text():
    events = [{"type": "response.created", "response": {"status": "in_progress", "output": []}}]
    events += [{"type": "response.output_text.delta", "delta": delta} for delta in ("Loo", "king")]
    events.append({"type": "response.output_item.done", "item": {"type": "function_call", "call_id": "1", **F}})
    answer = read(RESPONSES, *events, sse=True)
    assert said(answer) == ("Looking", None, CALLS[:1]) and not answer.ended
    failed = {"type": "response.failed", "response": {"status": "failed", "output": []}}
    assert read(RESPONSES, *events, failed, sse=True).failed
    spent = {
        "status": "incomplete",
        "incomplete_details": {"reason": "max_output_tokens"},
        "output": [],
        "usage": {"output_tokens": 9},
    }
    cut = read(RESPONSES, spent)
    assert cut.choices[0].finish == "length" and cut.usage == {"completion_tokens": 9}


BLOCKS = [
    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
    {"type": "redacted_thinking", "data": "xyz"},
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
    {"type": "text", "text": "Found.", "citations": [{"url": "u"}]},
    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
]


def test_what_anthropics_answer_says_beside_servers_tools():
    answer = read(
        MESSAGES, {"type": "message", "content": BLOCKS, "stop_reason": "tool_use", "usage": {"input_tokens": 5}}
    )
    assert said(answer) == ("Found.", "Hm.", [("f", '{"a":1}')])
    assert answer.choices[0].finish == "tool_calls" and answer.usage == {"prompt_tokens": 5}


def test_anthropics_stream_with_pings_nulls_and_an_error():
    start = {"input_tokens": 5, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 5, "output_tokens": 1}
    events = [
        {"type": "message_start", "message": {"role": "assistant", "content": [], "usage": start}},
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Found."}},
        {"type": "content_block_start", "index": 2, "content_block": {"type": "tool_use", "id": "1", "name": "f", "input": {}}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a":'}},
    ]  # fmt: skip
    cut = read(MESSAGES, *events, sse=True)
    assert said(cut) == ("Found.", "Hm.", [("f", '{"a":')]) and not cut.ended
    assert cut.usage == {"prompt_tokens": 100, "completion_tokens": 1, "cached_tokens": 90, "cache_write_tokens": 5}
    assert read(MESSAGES, *events, {"type": "error", "error": {"type": "overloaded_error"}}, sse=True).failed
    events += [
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": " 1}"}},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use"},
            "usage": {"input_tokens": None, "output_tokens": 7},
        },
        {"type": "message_stop"},
    ]
    whole = read(MESSAGES, *events, sse=True)
    assert said(whole)[2] == [("f", '{"a": 1}')] and whole.ended
    assert whole.usage["prompt_tokens"] == 100 and whole.usage["completion_tokens"] == 7


def test_geminis_candidates_code_and_images():
    def candidate(index, *parts):
        return {"index": index, "content": {"role": "model", "parts": list(parts)}, "finishReason": "STOP"}

    code = ({"executableCode": {"code": "1"}}, {"codeExecutionResult": {"output": "1"}}, {"inlineData": {"data": "x"}})
    answer = read(
        GEMINI,
        {
            "candidates": [
                candidate(0, {"text": "a"}, *code),
                candidate(1, {"text": "b"}, {"text": "t", "thought": True}),
            ]
        },
    )
    assert (said(answer, 0), said(answer, 1)) == (("a", None, []), ("b", "t", []))
    call = {"functionCall": {"name": "f", "args": {"a": 1}}}
    assert said(read(GEMINI, {"candidates": [candidate(0, call, call)]}))[2] == [("f", '{"a":1}')] * 2


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, GEMINI, "/api/chat", "/model/{model}/converse-stream"])
@pytest.mark.parametrize(
    "content", [b"", b"not json", b"[]", b"[1]", b'{"choices": 3}', b'data: {"index": 3}', b"\0" * 40]
)
def test_what_cannot_be_read_is_left_out(path, content):
    answer = read_answer(path, content)
    assert all(not choice.text for choice in answer.choices.values()) and not answer.failed


def test_a_line_that_is_cut_off_is_left_out():
    chunk = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'
    assert said(read_answer(CHAT, chunk + chunk[:30]))[0] == "a"


def test_an_error_in_the_middle_of_a_chat_stream_is_a_failure():
    assert read(CHAT, {"choices": [{"delta": {"content": "a"}}]}, {"error": {"message": "overloaded"}}, sse=True).failed


@pytest.mark.parametrize(
    "usage",
    [
        {"input_tokens": 5, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 5, "output_tokens": 7},
        {"inputTokens": 5, "cacheReadInputTokens": 90, "cacheWriteInputTokens": 5, "outputTokens": 7},
        {"prompt_tokens": 100, "completion_tokens": 7, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 5},
    ],
)
def test_cached_tokens_are_prompt_tokens_once(usage):
    assert usage_of(usage) == {
        "prompt_tokens": 100,
        "completion_tokens": 7,
        "cached_tokens": 90,
        "cache_write_tokens": 5,
    }


def test_thoughts_are_completion_tokens():
    usage = {"promptTokenCount": 100, "candidatesTokenCount": 4, "thoughtsTokenCount": 3, "cachedContentTokenCount": 90}
    assert usage_of(usage) == {"prompt_tokens": 100, "completion_tokens": 7, "cached_tokens": 90}
