"""Amazon Bedrock's ``converse`` and ``invoke`` through the capture server, with Amazon's and Anthropic's clients."""

import asyncio
import contextlib
import functools
import json

import anthropic
import boto3
import pytest
from botocore.exceptions import ClientError, EventStreamError
from botocore.session import get_session
from http_server import serving
from starlette.responses import Response
from starlette.routing import Route

from art_core.errors import UpstreamError
from art_gateway.dialects import bedrock
from art_gateway.dialects.bedrock import Converse

HI = [{"role": "user", "content": [{"text": "Hi"}]}]
CHAT_HI = [{"role": "user", "content": "Hi"}]
CACHE = {"cachePoint": {"type": "default"}}


@functools.cache
def session():
    return boto3.Session("a", "b", "c", region_name="us-east-1")


async def converse(desk, stream=False, **asked):
    """The answer; of a stream, its events."""
    client = session().client("bedrock-runtime", endpoint_url=desk.url)
    asked = {"modelId": "m", "messages": HI, **asked}
    try:
        if not stream:
            return await asyncio.to_thread(client.converse, **asked)
        return await asyncio.to_thread(lambda: list(client.converse_stream(**asked)["stream"]))
    finally:
        client.close()


def added_up(events):
    """The message, its end and its usage, of a stream."""
    blocks: dict = {}
    for event in events:
        if start := event.get("contentBlockStart"):
            blocks[start["contentBlockIndex"]] = {"toolUse": {**start["start"]["toolUse"], "input": ""}}
        if part := event.get("contentBlockDelta"):
            [(kind, value)] = part["delta"].items()
            block = blocks.setdefault(
                part["contentBlockIndex"], {kind: {"reasoningText": {}} if kind[0] == "r" else ""}
            )
            if kind == "text":
                block["text"] += value
            elif kind == "toolUse":
                block[kind]["input"] += value["input"]
            else:
                [(name, text)] = value.items()
                said = block[kind]["reasoningText"]
                said[name] = said.get(name, "") + text
    for block in blocks.values():
        if "toolUse" in block:
            block["toolUse"]["input"] = json.loads(block["toolUse"]["input"])
    names = [name for event in events for name in event]
    assert names[0] == "messageStart" and names[-2:] == ["messageStop", "metadata"]
    assert names.count("contentBlockStop") == len(blocks)
    content = [blocks[index] for index in sorted(blocks)]
    return {"role": "assistant", "content": content}, events[-2]["messageStop"]["stopReason"], events[-1]["metadata"]


async def said(desk, stream, **asked):
    answer = await converse(desk, stream, **asked)
    return added_up(answer) if stream else (answer["output"]["message"], answer["stopReason"], answer)


@pytest.fixture
def tools(city_schema):
    spec = {"name": "weather", "description": "Tells.", "inputSchema": {"json": city_schema}}
    return {"tools": [{"toolSpec": spec}, CACHE]}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_is_that_of_chat_and_is_recorded_like_it(opened, stream):
    async with opened("Hello.") as desk:
        settings = {"maxTokens": 9, "temperature": 0.5, "topP": 0.9, "stopSequences": ["x"]}
        message, reason, rest = await said(
            desk,
            stream,
            modelId="arn:aws:bedrock:us-east-1:1:inference-profile/us.claude:0",
            system=[{"text": "Be brief."}, CACHE],
            inferenceConfig=settings,
            additionalModelRequestFields={"top_k": 3},
            requestMetadata={"a": "b"},
            performanceConfig={"latency": "optimized"},
        )
        assert (message, reason) == ({"role": "assistant", "content": [{"text": "Hello."}]}, "end_turn")
        assert desk.all_recorded(1)
        [call] = desk.calls
        spent = rest["usage"]
        assert (spent["inputTokens"], spent["outputTokens"]) == (len(call.prompt_ids), len(call.sampled_ids))
        assert spent["totalTokens"] == spent["inputTokens"] + spent["outputTokens"]
        assert rest["metrics"]["latencyMs"] >= 0
        asked = {"temperature": 0.5, "top_p": 0.9, "stop": ["x"], "max_completion_tokens": 9}
        sent = dict(desk.engine.requests[0])
        assert sent.pop("model") == "arn:aws:bedrock:us-east-1:1:inference-profile/us.claude:0"
        assert sent.pop("top_k") == 3 and sent.pop("stream", False) == stream
        sent.pop("stream_options", None)
        assert sent.pop("messages") == [{"role": "system", "content": "Be brief."}, *CHAT_HI] and sent == asked
        assert await desk.same_as_chat(messages=[{"role": "system", "content": "Be brief."}, *CHAT_HI], **asked)


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_make_the_round_trip_with_their_results(opened, two_calls, tools, chat_tool, stream):
    two_calls["tool_calls"][1]["function"]["arguments"] = '{"city":"Rome"}'  # not as it is written when it comes back
    async with opened(two_calls, "Both sunny.") as desk:
        answer, reason, _ = await said(desk, stream, toolConfig=tools)
        assert reason == "tool_use"
        assert answer["content"][0] == {"text": "Let me look."}
        first, second = (block["toolUse"] for block in answer["content"][1:])
        assert [call["input"] for call in (first, second)] == [{"city": "Paris"}, {"city": "Rome"}]
        results = [
            {"toolUseId": first["toolUseId"], "content": [{"json": {"sky": "sun"}}], "status": "success"},
            {"toolUseId": second["toolUseId"], "content": [{"text": "gone"}], "status": "error"},
        ]
        told = {"role": "user", "content": [{"toolResult": result} for result in results]}
        # The other path knows as well what was sampled here.
        await said(desk, not stream, toolConfig=tools, messages=[*HI, answer, told])
        assert desk.all_recorded(2)
        assert desk.engine.requests[0]["tools"] == [chat_tool]
        assert desk.engine.requests[1]["messages"] == [
            *CHAT_HI,
            {"role": "assistant", **two_calls},
            {"role": "tool", "tool_call_id": "call_0", "content": '{"sky": "sun"}'},
            {"role": "tool", "tool_call_id": "call_1", "content": "Error: gone"},
        ]


@pytest.mark.parametrize(
    ("choice", "in_chat"),
    [
        ({"auto": {}}, "auto"),
        ({"any": {}}, "required"),
        ({"tool": {"name": "weather"}}, {"type": "function", "function": {"name": "weather"}}),
    ],
)
async def test_the_choice_of_tools_reaches_the_engine(opened, tools, choice, in_chat):
    async with opened("ok") as desk:
        await converse(desk, toolConfig={**tools, "toolChoice": choice})
        assert desk.engine.requests[0]["tool_choice"] == in_chat


async def test_a_schema_images_and_thinking_are_those_of_chat(opened, city_schema):
    async with opened('{"city": "Rome"}') as desk:
        schema = {"jsonSchema": {"schema": json.dumps(city_schema), "name": "city"}}
        picture = {"image": {"format": "png", "source": {"bytes": b"\x89PNG"}}}
        await converse(
            desk,
            messages=[{"role": "user", "content": [{"text": "What?"}, picture]}],
            outputConfig={"textFormat": {"type": "json_schema", "structure": schema}, "effort": "low"},
            additionalModelRequestFields={"thinking": {"type": "disabled"}},
        )
        [request] = desk.engine.requests
        assert request["response_format"]["json_schema"]["schema"] == city_schema
        assert request["reasoning_effort"] == "low" and request["chat_template_kwargs"] == {"enable_thinking": False}
        assert request["messages"][0]["content"][1]["image_url"]["url"] == "data:image/png;base64,iVBORw=="


async def test_an_answer_that_was_cut_says_so_and_an_empty_one_has_an_empty_text(opened):
    async with opened({"content": "", "finish_reason": "length"}) as desk:
        for stream in (False, True):
            message, reason, _ = await said(desk, stream)
            assert message["content"] == [{"text": ""}] and reason in ("end_turn", "max_tokens")


def in_a_message(block):
    return {"messages": [{"role": "user", "content": [block]}]}


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"guardrailConfig": {"guardrailIdentifier": "g", "guardrailVersion": "1"}}, "'guardrailConfig'.*in the agent"),
        ({"promptVariables": {"a": {"text": "b"}}}, "'promptVariables'.*whole conversation"),
        ({"additionalModelResponseFieldPaths": ["/a"]}, "'additionalModelResponseFieldPaths'.*leave it out"),
        ({"additionalModelRequestFields": {"inferenceConfig": {"topK": 3}}}, "RequestFields' with 'inferenceConfig'"),
        ({"toolConfig": {"tools": [{"systemTool": {"name": "nova_grounding"}}]}}, "'systemTool'.*'toolSpec'"),
        (in_a_message({"document": {"name": "d", "source": {"bytes": b"a"}}}), "'document'.*its text"),
        (in_a_message({"video": {"format": "mp4", "source": {"bytes": b"a"}}}), "'video'"),
        (in_a_message({"image": {"format": "png", "source": {"s3Location": {"uri": "s3://a"}}}}), "as 'bytes'"),
        (in_a_message({"guardContent": {"text": {"text": "a"}}}), "'guardContent'"),
        (
            {"messages": [{"role": "assistant", "content": [{"reasoningContent": {"redactedContent": b"a"}}]}, *HI]},
            "read",
        ),
        ({"messages": [*HI, {"role": "assistant", "content": [{"text": "He"}]}]}, "prefilled"),
    ],
)
async def test_what_cannot_be_translated_is_refused_by_name_and_not_asked_again(opened, what, named):
    async with opened("ok") as desk:
        with pytest.raises(ClientError, match=f"(?s)ValidationException.*{named}") as refusal:
            await converse(desk, stream="guardrailConfig" in what, **what)
        assert refusal.value.response["ResponseMetadata"]["RetryAttempts"] == 0
        assert refusal.value.response["ResponseMetadata"]["HTTPStatusCode"] == 400
        assert desk.calls == desk.engine.requests == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, "ResourceNotFoundException"), (409, "ValidationException"), (502, "InternalServerException")],
)
async def test_an_error_of_the_engine_is_the_clients_of_its_kind(opened, status, kind):
    def fail(request):
        raise UpstreamError("there is no such thing", status=status)

    async with opened(fail) as desk:
        client = session().client("bedrock-runtime", endpoint_url=desk.url)
        with pytest.raises(ClientError, match="no such thing") as error:
            await asyncio.to_thread(client.converse, modelId="m", messages=HI)
        client.close()
        assert error.value.response["Error"]["Code"] == kind


@contextlib.asynccontextmanager
async def streamed(*deltas, last=b""):
    """The stream of an answer of these parts, and of ``last``."""

    async def chunks():
        for delta in deltas:
            yield {"choices": [{"index": 0, "delta": delta}]}

    async def answer(request):
        events = [event async for event in Converse().stream_from_chat({}, chunks())]
        return Response(b"".join([*events, last]), headers={"connection": "close"})

    with serving(Route("/model/m/converse-stream", answer, methods=["POST"])) as url:
        client = session().client("bedrock-runtime", endpoint_url=url)
        with contextlib.closing(
            (await asyncio.to_thread(client.converse_stream, modelId="m", messages=HI))["stream"]
        ) as it:
            yield it
        client.close()


async def test_thinking_is_shown_and_comes_back(opened):
    thinking = {"reasoningContent": {"reasoningText": {"text": "Which one?", "signature": "policy"}}}
    async with streamed({"reasoning_content": "Which"}, {"reasoning": " one?"}, {"content": "Rome."}) as events:
        message, *_ = added_up(list(events))
    assert message["content"] == [thinking, {"text": "Rome."}]
    async with opened({"content": "Rome.", "reasoning_content": "Which one?"}) as desk:
        assert (await said(desk, stream=False))[0] == message
        await converse(desk, messages=[*HI, message, *HI])
        assert desk.engine.requests[1]["messages"][1] == {
            "role": "assistant",
            "content": "Rome.",
            "reasoning_content": "Which one?",
        }


@pytest.mark.parametrize(("status", "kind"), [(400, "validation"), (429, "throttling"), (502, "internalServer")])
async def test_a_stream_that_fails_raises_in_the_client(status, kind):
    async with streamed({"content": "He"}, last=Converse().error_event("it is gone", status, None)) as events:
        with pytest.raises(EventStreamError, match=rf"\({kind}Exception\).*it is gone"):
            list(events)


async def test_tokens_are_counted_by_the_policy_and_nothing_is_recorded(opened, tools):
    async with opened("ok") as desk:
        client = session().client("bedrock-runtime", endpoint_url=desk.url)
        asked = {"converse": {"messages": HI, "toolConfig": tools}}
        counted = await asyncio.to_thread(client.count_tokens, modelId="m", input=asked)
        assert not desk.calls
        await asyncio.to_thread(client.converse, modelId="m", **asked["converse"])
        assert counted["inputTokens"] == len(desk.calls[0].prompt_ids)
        with pytest.raises(ClientError, match="'input'"):
            await asyncio.to_thread(client.count_tokens, modelId="m", input={"invokeModel": {"body": b"{}"}})
        client.close()


async def test_invoke_answers_bodies_of_anthropic_and_refuses_others(opened):
    async with opened("Hello.") as desk:
        keys = {"aws_access_key": "a", "aws_secret_key": "b", "aws_region": "us-east-1"}
        async with anthropic.AsyncAnthropicBedrock(base_url=desk.url, **keys) as client:
            asked = {"model": "us.claude:0", "max_tokens": 9, "messages": CHAT_HI}
            message = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                streamed = await stream.get_final_message()
        assert message.content[0].text == streamed.content[0].text == "Hello."
        assert desk.all_recorded(2) and desk.engine.requests[0]["model"] == "us.claude:0"
        client = session().client("bedrock-runtime", endpoint_url=desk.url)
        for ask in (client.invoke_model, client.invoke_model_with_response_stream):
            with pytest.raises(ClientError, match=r"ValidationException.*isn't Anthropic's.*'converse'"):
                await asyncio.to_thread(ask, modelId="amazon.nova", body=json.dumps({"messages": HI}))
        client.close()


def test_every_parameter_of_the_client_is_translated_refused_or_known_to_be_neutral():
    service = get_session().get_service_model("bedrock-runtime")
    for operation in ("Converse", "ConverseStream"):
        asked = set(service.operation_model(operation).input_shape.members) - {"modelId"}
        assert not asked - bedrock.REFUSED.keys() - bedrock.NEUTRAL - bedrock.TRANSLATED
