"""The dialects by themselves: what goes through them comes out as it went in, and every chunk of a stream counts."""

import asyncio
import copy
import json
import pickle
import typing
from contextlib import asynccontextmanager

import anthropic
import openai
import pytest
from anthropic.types import message_create_params as anthropic_params
from anthropic.types.beta import message_create_params as anthropic_beta_params
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.responses import response_create_params

from art_core.errors import UpstreamError
from art_gateway import dialects
from art_gateway.dialects import messages, responses
from art_gateway.dialects.bedrock import Converse
from art_gateway.dialects.completions import Completions
from art_gateway.dialects.conversations import Cache, Conversations
from art_gateway.dialects.gemini import Gemini
from art_gateway.dialects.messages import Messages
from art_gateway.dialects.ollama import Ollama
from art_gateway.dialects.responses import Responses

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
ARGUMENTS = st.dictionaries(
    TEXT, st.none() | st.booleans() | st.integers() | TEXT | st.lists(TEXT, max_size=2), max_size=3
)


@st.composite
def assistants(draw, arguments):
    """An assistant's answer, with the results of its tools after it."""
    calls = draw(st.lists(st.tuples(TEXT, arguments), max_size=3))
    message = {"role": "assistant", "content": draw(TEXT) if not calls else draw(st.none() | TEXT)}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": text}}
            for i, (name, text) in enumerate(calls)
        ]
    if draw(st.booleans()):
        message["reasoning_content"] = draw(TEXT)
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": draw(TEXT)} for i in range(len(calls))]
    return [message, *results]


@st.composite
def conversations(draw, arguments):
    """Chat messages that begin and end with the user's."""
    turns = [{"role": "user", "content": draw(TEXT)}]
    for answer in draw(st.lists(assistants(arguments), max_size=4)):
        turns += [*answer, {"role": "user", "content": draw(TEXT)}]
    return turns


def completion(message, finish_reason="stop", **choice):
    choices = [{"index": 0, "message": message, "finish_reason": finish_reason, **choice}]
    return {"id": "chatcmpl-1", "created": 1, "model": "m", "choices": choices}


def chunk(delta, finish_reason=None, **choice):
    choices = [{"index": 0, "delta": delta, "finish_reason": finish_reason, **choice}]
    return {"id": "chatcmpl-1", "created": 1, "model": "m", "choices": choices}


def stream(dialect, *chunks):
    """The bodies of the events that a dialect makes of chunks."""

    async def collect():
        async def relay():
            for one in chunks:
                yield one

        return [event async for event in dialect.stream_from_chat({"input": "Hi"}, relay())]

    events = asyncio.run(collect())
    return [json.loads(event.split(b"data: ", 1)[-1]) for event in events]


@settings(deadline=None)
@given(conversations(st.builds(json.dumps, ARGUMENTS) | TEXT))
def test_a_conversation_through_responses_is_the_conversation_in_chat(chat):
    dialect, items = Responses(), []
    for message in chat:
        if message["role"] == "assistant":
            items += dialect.from_chat({"input": "Hi"}, completion(message))["output"]
        elif message["role"] == "tool":
            call_id, content = message["tool_call_id"], message["content"]
            items.append({"type": "function_call_output", "call_id": call_id, "output": content})
        else:
            items.append(message)
    assert dialect.to_chat({"input": items})["messages"] == chat


@settings(deadline=None)
@given(conversations(st.builds(json.dumps, ARGUMENTS) | TEXT))
def test_a_conversation_through_messages_is_the_conversation_in_chat(chat):
    dialect, turns = Messages(), []
    for message in chat:
        if message["role"] == "assistant":
            content = dialect.from_chat({}, completion(message))["content"]
            ids = iter([block["id"] for block in content if block["type"] == "tool_use"])
            turns.append({"role": "assistant", "content": content})
        elif message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": next(ids), "content": message["content"]}
            turns.append({"role": "user", "content": [block]})
        else:
            turns.append(message)
    assert dialect.to_chat({"messages": turns})["messages"] == chat


@settings(deadline=None)
@given(conversations(st.builds(json.dumps, ARGUMENTS) | TEXT))
def test_a_conversation_through_converse_is_the_conversation_in_chat(chat):
    dialect, turns = Converse(), []
    for message in chat:
        if message["role"] == "assistant":
            turns.append(dialect.from_chat({}, completion(message))["output"]["message"])
            ids = iter([block["toolUse"]["toolUseId"] for block in turns[-1]["content"] if "toolUse" in block])
        elif message["role"] == "tool":
            result = {"toolUseId": next(ids), "content": [{"text": message["content"]}]}
            turns.append({"role": "user", "content": [{"toolResult": result}]})
        else:
            turns.append({"role": "user", "content": [{"text": message["content"]}]})
    assert dialect.to_chat({"messages": turns})["messages"] == chat


@settings(deadline=None)
@given(conversations(st.builds(json.dumps, ARGUMENTS) | TEXT), st.booleans(), st.booleans())
def test_a_conversation_through_gemini_is_the_conversation_in_chat(chat, with_ids, thoughts):
    dialect, contents = Gemini(streams=False), []
    for message in chat:
        if message["role"] == "assistant":
            body = {"generation_config": {"thinking_config": {"include_thoughts": thoughts}}}
            content = dialect.from_chat(body, completion(message))["candidates"][0]["content"]
            calls = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
            ids = iter([(call["name"], call["id"] if with_ids else call.pop("id")) for call in calls])
            contents.append(content)
        elif message["role"] == "tool":
            name, call_id = next(ids)
            response = {"name": name, "response": {"result": message["content"]}} | (
                {"id": call_id} if with_ids else {}
            )
            contents.append({"role": "user", "parts": [{"functionResponse": response}]})
        else:
            contents.append({"role": "user", "parts": [{"text": message["content"]}]})
    assert dialect.to_chat({"contents": contents})["messages"] == (chat if with_ids else numbered(chat))


@settings(deadline=None)
@given(conversations(st.builds(json.dumps, ARGUMENTS) | TEXT))
def test_a_conversation_through_ollama_is_the_conversation_in_chat(chat):
    dialect, messages = Ollama(), []
    for message in chat:
        if message["role"] == "assistant":
            answer = dialect.from_chat({}, completion(message))["message"]
            calls = answer.get("tool_calls", [])
            tools = iter([call["function"]["name"] for call in calls if call.pop("id")])
            messages.append(answer)
        elif message["role"] == "tool":
            messages.append({"role": "tool", "tool_name": next(tools), "content": message["content"]})
        else:
            messages.append(message)
    assert dialect.to_chat({"messages": messages})["messages"] == numbered(chat)


def numbered(chat):
    """The conversation with the ids that calls are given if they come back without."""
    count, chat = 0, copy.deepcopy(chat)
    for message in chat:
        for call in message.get("tool_calls", ()):
            count += 1
            call["id"] = f"call_{count}"
        if message["role"] == "assistant":
            ids = iter([call["id"] for call in message.get("tool_calls", ())])
        elif message["role"] == "tool":
            message["tool_call_id"] = next(ids)
    return chat


@settings(deadline=None)
@given(assistants(st.builds(json.dumps, ARGUMENTS)), st.integers(1, 7))
def test_however_a_stream_is_cut_it_ends_in_the_same_response(turn, size):
    message = turn[0]
    cut = [message.get("reasoning_content") or "", message["content"] or ""]
    deltas = [{"reasoning": cut[0][i : i + size]} for i in range(0, len(cut[0]), size)]
    deltas += [{"content": cut[1][i : i + size]} for i in range(0, len(cut[1]), size)]
    for index, call in enumerate(message.get("tool_calls", ())):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        deltas.append({"tool_calls": [{"index": index, "id": call["id"], "function": {"name": name, "arguments": ""}}]})
        for i in range(0, len(arguments), size):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments[i : i + size]}}]})
    chunks = [*map(chunk, deltas), chunk({}, "stop")]
    dialect = Responses()
    whole = dialect.from_chat({"input": "Hi"}, completion(message))
    streamed = stream(dialect, *chunks)[-1]["response"]
    hidden = [response.pop("id") and [item.pop("id") for item in response["output"]] for response in (whole, streamed)]
    assert whole == streamed
    assert hidden[0] != hidden[1]
    anthropic_whole = Messages().from_chat({}, completion(message))["content"]
    assert unnamed(accumulated(stream(Messages(), *chunks))) == unnamed(anthropic_whole)
    gemini = Gemini(streams=False)
    contents = [event["candidates"][0]["content"] for event in stream(gemini, *chunks)]
    turns = [
        [content] for content in (contents, [gemini.from_chat({}, completion(message))["candidates"][0]["content"]])
    ]
    then = {"role": "user", "parts": [{"text": "Go on."}]}
    streamed, whole = (gemini.to_chat({"contents": [*turn[0], then]})["messages"] for turn in turns)
    assert streamed == whole == [message, {"role": "user", "content": "Go on."}]


def unnamed(blocks):
    return [{key: value for key, value in block.items() if key != "id"} for block in blocks]


def accumulated(events):
    """Add an Anthropic stream up, block by block, as its clients do."""
    blocks, fields = [], {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                blocks[-1]["input"] = json.loads(delta["partial_json"])
            else:
                blocks[-1][fields[delta["type"]]] += delta[fields[delta["type"]]]
    return blocks


def test_thinking_between_two_texts_is_an_item_of_its_own_and_nothing_grows_after_its_end():
    deltas = [{"reasoning": "t1"}, {"content": "a"}, {"reasoning": "t2"}, {"content": "b"}]
    events = stream(Responses(), *map(chunk, deltas), chunk({}, "stop"))
    done = set()
    for event in events:
        assert event.get("item_id") not in done
        if event["type"] == "response.output_item.done":
            done.add(event["item"]["id"])
    output = events[-1]["response"]["output"]
    assert [(item["type"], item["content"][0]["text"]) for item in output] == [
        ("reasoning", "t1"),
        ("message", "a"),
        ("reasoning", "t2"),
        ("message", "b"),
    ]


def test_tool_calls_that_grow_side_by_side_stay_apart():
    parts = [(0, "a", "{"), (1, "b", "["), (0, None, "}"), (1, None, "]")]
    chunks = [
        chunk(
            {"tool_calls": [{"index": i, "id": name and f"id_{name}", "function": {"name": name, "arguments": text}}]}
        )
        for i, name, text in parts
    ]
    output = stream(Responses(), *chunks, chunk({}, "tool_calls"))[-1]["response"]["output"]
    assert [(item["call_id"], item["name"], item["arguments"]) for item in output] == [
        ("id_a", "a", "{}"),
        ("id_b", "b", "[]"),
    ]
    blocks = accumulated(stream(Messages(), *chunks, chunk({}, "tool_calls")))
    assert [(block["id"], block["input"]) for block in blocks] == [("id_a", {}), ("id_b", {"INVALID_JSON": "[]"})]


def test_an_answer_that_was_cut_says_so():
    cut = completion({"content": "He"}, "length")
    response = Responses().from_chat({"input": "Hi", "max_output_tokens": 1}, cut)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert response["output"][0]["status"] == "incomplete"
    assert stream(Responses(), chunk({"content": "He"}, "length"))[-1]["type"] == "response.incomplete"
    assert Messages().from_chat({}, cut)["stop_reason"] == "max_tokens"
    assert Completions().from_chat({}, cut)["choices"][0]["finish_reason"] == "length"
    assert Gemini(streams=False).from_chat({}, cut)["candidates"][0]["finishReason"] == "MAX_TOKENS"
    assert Ollama().from_chat({}, cut)["done_reason"] == "length"


def test_the_stop_sequence_that_ended_an_answer_is_named():
    message = Messages().from_chat({}, completion({"content": "a"}, stop_reason="END"))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    delta = stream(Messages(), chunk({"content": "a"}), chunk({}, "stop", stop_reason="END"))[-2]["delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_an_answer_without_anything_has_an_empty_text():
    nothing = completion({"role": "assistant", "content": None})
    assert Responses().from_chat({"input": "Hi"}, nothing)["output"][0]["content"][0]["text"] == ""
    assert Messages().from_chat({}, nothing)["content"] == [{"type": "text", "text": ""}]
    assert Completions().from_chat({}, nothing)["choices"][0]["text"] == ""
    assert Gemini(streams=False).from_chat({}, nothing)["candidates"][0]["content"]["parts"] == [{"text": ""}]
    assert Ollama().from_chat({}, nothing)["message"] == {"role": "assistant", "content": ""}


def test_logprobs_are_given_where_they_are_asked_for():
    token = {"token": "He", "logprob": -0.5, "bytes": [72, 101], "top_logprobs": [{"token": "He", "logprob": -0.5}]}
    answer = completion({"content": "He"}, logprobs={"content": [token]})
    body = {"input": "Hi", "include": ["message.output_text.logprobs"]}
    assert Responses().from_chat(body, answer)["output"][0]["content"][0]["logprobs"] == [token]
    assert Completions().from_chat({}, answer)["choices"][0]["logprobs"] == {
        "tokens": ["He"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"He": -0.5}],
        "text_offset": [0],
    }


def test_input_items_become_the_messages_that_the_openai_agents_sdk_makes_of_them():
    converter = pytest.importorskip("agents.models.chatcmpl_converter").Converter
    call = {"type": "function_call", "name": "weather", "arguments": '{"a":1}'}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me look.", "annotations": []}],
        },
        {**call, "call_id": "a"},
        {**call, "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "sun"},
        {"type": "function_call_output", "call_id": "b", "output": "rain"},
        {"role": "assistant", "content": "Mixed."},
        {"role": "user", "content": "Thanks."},
    ]
    assert responses.to_messages(items) == list(converter.items_to_messages(items))


@pytest.mark.parametrize(
    ("params", "places"),
    [
        (
            response_create_params.ResponseCreateParamsStreaming,
            responses.NEUTRAL | responses.TRANSLATED | set(responses.SAME) | responses.REFUSED.keys(),
        ),
        (
            anthropic_params.MessageCreateParamsStreaming,
            messages.NEUTRAL | messages.TRANSLATED | set(messages.SAME) | messages.REFUSED.keys(),
        ),
        (
            anthropic_beta_params.MessageCreateParamsStreaming,
            messages.NEUTRAL | messages.TRANSLATED | set(messages.SAME) | messages.REFUSED.keys(),
        ),
        (
            completion_create_params.CompletionCreateParamsStreaming,
            # All but the refused ones are chat's own, or translated.
            set(completion_create_params.CompletionCreateParamsStreaming.__annotations__),
        ),
    ],
    ids=["responses", "messages", "beta messages", "completions"],
)
def test_every_parameter_of_the_clients_is_translated_refused_or_known_to_be_neutral(params, places):
    assert not set(typing.get_type_hints(params)) - places


def test_dialects_travel_to_the_serving_process():
    for path, dialect in pickle.loads(pickle.dumps(dialects())).items():
        assert type(dialect) is type(dialects()[path])


def test_the_least_recently_used_conversation_is_dropped_first():
    cache = Cache(limit=10)
    cache.put("a", b"12345")
    cache.put("b", b"12345")
    assert cache.get("a") == b"12345"
    cache.put("c", b"1")
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (b"12345", None, b"1")
    with pytest.raises(UpstreamError, match=r"nowhere.*send the whole conversation"):
        Conversations().before("nowhere")


@asynccontextmanager
async def broken_stream(*events):
    """An address that answers every request with these events and then ends."""

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        writer.write(b"".join(events))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def first_events(dialect, delta):
    async def relay():
        yield chunk(delta)

    return [event async for event in dialect.stream_from_chat({"input": "Hi"}, relay())][:4]


async def test_a_stream_that_fails_raises_in_the_openai_client():
    events = await first_events(Responses(), {"content": "He"})
    error = Responses().error_event("the server is gone", 502, "gone")
    async with (
        broken_stream(*events, error) as url,
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.APIError, match="the server is gone"):
            async for _ in await client.responses.create(model="m", input="Hi", stream=True):
                pass


@pytest.mark.parametrize(
    ("status", "raised", "kind"),
    [(400, "BadRequestError", "invalid_request_error"), (502, "InternalServerError", "api_error")],
)
async def test_a_stream_that_fails_raises_in_the_anthropic_client(status, raised, kind):
    events = await first_events(Messages(), {"content": "He"})
    error = Messages().error_event("the server is gone", status, "gone")
    assert Messages().error("the server is gone", status, "gone")["error"]["type"] == kind
    async with (
        broken_stream(*events, error) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(anthropic.APIError, match="the server is gone"):
            async with client.messages.stream(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "Hi"}]
            ) as stream:
                await stream.until_done()
