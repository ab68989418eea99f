"""``/v1/responses`` through the capture server, with the OpenAI client and the OpenAI Agents SDK."""

import asyncio

import openai
import pytest
from pydantic import BaseModel

from art_core.errors import UpstreamError


class City(BaseModel):
    city: str


@pytest.fixture
def tool(city_schema):
    return {"type": "function", "name": "weather", "description": "Tells.", "parameters": city_schema, "strict": None}


def kinds(response) -> list[str]:
    return [item.type for item in response.output]


async def test_an_answer_is_that_of_chat_and_is_recorded_like_it(opened):
    async with opened("Hello.") as desk:
        response = await desk.openai.responses.create(model="m", instructions="Be brief.", input="Hi")
        assert (response.output_text, response.status, response.object) == ("Hello.", "completed", "response")
        assert response.instructions == "Be brief."
        assert desk.all_recorded(1)
        [call] = desk.calls
        assert response.usage.input_tokens == len(call.prompt_ids)
        assert response.usage.output_tokens == len(call.sampled_ids)
        system = {"role": "system", "content": "Be brief."}
        assert await desk.same_as_chat(messages=[system, {"role": "user", "content": "Hi"}])


async def test_the_sync_client_is_answered_too(opened):
    async with opened("Hello.") as desk:

        def ask() -> str:
            with openai.OpenAI(base_url=desk.url, api_key="none", max_retries=0) as client:
                text = client.responses.create(model="m", input="Hi").output_text
                with client.responses.stream(model="m", input="Hi") as stream:
                    return text + stream.get_final_response().output_text

        assert await asyncio.to_thread(ask) == "Hello.Hello."
        assert desk.all_recorded(2)


async def test_a_stream_ends_in_the_response_that_is_given_without_streaming(opened, two_calls, tool):
    async with opened(two_calls) as desk:
        async with desk.openai.responses.stream(model="m", input="Hi", tools=[tool]) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        whole = await desk.openai.responses.create(model="m", input="Hi", tools=[tool])
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Let me look."
        assert kinds(streamed) == kinds(whole) == ["message", "function_call", "function_call"]
        for mine, other in zip(streamed.output[1:], whole.output[1:], strict=True):
            assert (mine.call_id, mine.name, mine.arguments) == (other.call_id, other.name, other.arguments)
        assert streamed.output_text == whole.output_text == "Let me look."
        assert streamed.usage == whole.usage
        assert desk.all_recorded(2)


async def test_every_item_of_a_stream_is_opened_filled_and_closed(opened, two_calls, tool):
    async with opened(two_calls) as desk:
        stream = await desk.openai.responses.create(model="m", input="Hi", tools=[tool], stream=True)
        events = [event async for event in stream]
    added = {e.item.id: e.output_index for e in events if e.type == "response.output_item.added"}
    done = {e.item.id: e.output_index for e in events if e.type == "response.output_item.done"}
    assert added == done
    assert list(added.values()) == [0, 1, 2]
    for item_id in list(added)[1:]:
        parts = [e.delta for e in events if e.type == "response.function_call_arguments.delta" and e.item_id == item_id]
        [end] = [e for e in events if e.type == "response.function_call_arguments.done" and e.item_id == item_id]
        assert "".join(parts) == end.arguments
        assert end.name == "weather"
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]


async def test_tools_make_the_round_trip_with_their_outputs(opened, two_calls, tool, chat_tool):
    async with opened(two_calls, "Both sunny.", "Both sunny.") as desk:
        create = desk.openai.responses.create
        first = await create(model="m", input="Weather?", tools=[tool])
        calls = [item for item in first.output if item.type == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls]
        question = {"role": "user", "content": "Weather?"}
        second = await create(model="m", input=[question, *first.output, *outputs], tools=[tool])
        assert second.output_text == "Both sunny."
        assert desk.all_recorded(2)
        results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": "sun"} for i in range(2)]
        messages = [question, {"role": "assistant", **two_calls}, *results]
        assert await desk.same_as_chat(messages=messages, tools=[chat_tool])
        assert desk.calls[1].prompt_ids[: len(desk.calls[0].prompt_ids)] == desk.calls[0].prompt_ids


async def test_a_previous_response_stands_for_the_conversation_before_it(opened, two_calls, tool):
    async with opened(two_calls, "One.", "Two.") as desk:
        create = desk.openai.responses.create
        first = await create(model="m", instructions="Be brief.", input="Weather?", tools=[tool])
        calls = [item for item in first.output if item.type == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls]
        second = await create(model="m", previous_response_id=first.id, input=outputs, stream=True)
        second = [event async for event in second][-1].response
        await create(model="m", previous_response_id=second.id, input="And?")
        roles = [message["role"] for message in desk.engine.requests[-1]["messages"]]
        # Instructions are not carried over: each request brings its own.
        assert roles == ["user", "assistant", "tool", "tool", "assistant", "user"]
        assert desk.engine.requests[-1]["messages"][1] == {"role": "assistant", **two_calls}
        assert desk.all_recorded(3)


async def test_a_response_that_is_not_kept_is_refused_by_its_id(opened):
    async with opened("ok") as desk:
        unkept = await desk.openai.responses.create(model="m", input="Hi", store=False)
        for response_id in (unkept.id, "resp_of_another_server"):
            with pytest.raises(openai.BadRequestError, match=f"{response_id}.*send the whole conversation"):
                await desk.openai.responses.create(model="m", previous_response_id=response_id, input="And?")


async def test_structured_output_is_asked_for_and_parsed(opened):
    async with opened('{"city": "Paris"}') as desk:
        response = await desk.openai.responses.parse(model="m", input="Where?", text_format=City)
        assert response.output_parsed == City(city="Paris")
        asked = desk.engine.requests[0]["response_format"]
        assert (asked["type"], asked["json_schema"]["name"]) == ("json_schema", "City")
        assert asked["json_schema"]["strict"] is True
        assert asked["json_schema"]["schema"]["required"] == ["city"]
        assert desk.all_recorded(1)


async def test_settings_reach_the_engine_under_their_names_in_chat(opened, tool):
    async with opened("ok") as desk:
        await desk.openai.responses.create(
            model="m",
            input="Hi",
            tools=[tool],
            tool_choice={"type": "function", "name": "weather"},
            parallel_tool_calls=False,
            max_output_tokens=7,
            temperature=0.5,
            top_p=0.9,
            reasoning={"effort": "low"},
            text={"verbosity": "low"},
            include=["message.output_text.logprobs"],
            metadata={"run": "1"},
            extra_body={"repetition_penalty": 1.1},
        )
        assert desk.engine.requests[0] == {
            "model": "m",
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": {k: tool[k] for k in ("name", "description", "parameters")}}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": False,
            "max_completion_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "reasoning_effort": "low",
            "verbosity": "low",
            "logprobs": True,
            "top_logprobs": 0,
            "repetition_penalty": 1.1,
        }


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"tools": [{"type": "web_search"}]}, "web_search.*a function that the agent runs"),
        ({"tools": [{"type": "file_search", "vector_store_ids": ["v"]}]}, "file_search"),
        ({"tools": [{"type": "computer_use_preview"}]}, "computer_use_preview"),
        ({"tools": [{"type": "mcp", "server_label": "m"}]}, "mcp"),
        ({"tools": [{"type": "custom", "name": "c"}]}, "custom"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "allowed_tools.*only the allowed tools",
        ),
        ({"background": True}, "background.*wait"),
        ({"conversation": "conv_1"}, "conversation.*input"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt.*instructions"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        ({"input": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}]}, "web_search_call"),
        ({"input": [{"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x"}]}, "encrypted"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input_file"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "uploaded image"),
        ({"input": 3}, "'input' must be a list"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "'arguments' as a string"),
    ],
)
async def test_what_cannot_be_translated_is_refused_by_name(opened, what, named):
    async with opened("ok") as desk:
        with pytest.raises(openai.BadRequestError, match=named) as refusal:
            await desk.openai.responses.create(**{"model": "m", "input": "Hi", **what})
        assert refusal.value.response.headers["x-should-retry"] == "false"
        assert desk.calls == desk.engine.requests == []


async def test_an_image_reaches_the_engine(opened):
    url = "data:image/png;base64,AAAA"
    async with opened("A cat.") as desk:
        parts = [{"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": url, "detail": "low"}]
        await desk.openai.responses.create(model="m", input=[{"role": "user", "content": parts}])
        [message] = desk.engine.requests[0]["messages"]
        assert message["content"] == [
            {"type": "text", "text": "What?"},
            {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        ]


async def test_an_upstream_error_inside_a_stream_is_raised_by_the_client(opened):
    def fail(request):
        raise UpstreamError("the context is too long", status=400, code="context_length_exceeded")

    async with opened(fail) as desk:
        with pytest.raises(openai.BadRequestError, match="too long"):
            await desk.openai.responses.create(model="m", input="Hi", stream=True)


async def test_agents_of_the_openai_agents_sdk_call_tools_and_hand_off(opened, two_calls):
    agents = pytest.importorskip("agents")
    hand_off = {"id": "call_9", "type": "function", "function": {"name": "transfer_to_expert", "arguments": "{}"}}
    async with opened({"content": None, "tool_calls": [hand_off]}, two_calls, "Both sunny.") as desk:
        model = agents.OpenAIResponsesModel(model="m", openai_client=desk.openai)
        seen = []

        @agents.function_tool
        def weather(city: str) -> str:
            seen.append(city)
            return "sun"

        expert = agents.Agent(name="expert", model=model, tools=[weather])
        first = agents.Agent(name="first", model=model, instructions="Hand off.", handoffs=[expert])
        config = agents.RunConfig(tracing_disabled=True)
        result = await agents.Runner.run(first, "Weather?", run_config=config)
        assert result.final_output == "Both sunny."
        assert sorted(seen) == ["Paris", "Rome"]
        streamed = agents.Runner.run_streamed(first, "Weather?", run_config=config)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == "Both sunny."
        assert desk.all_recorded(6)
        assert [call.sampled_ids for call in desk.calls[:3]] == [call.sampled_ids for call in desk.calls[3:]]


async def test_tokens_are_counted_by_the_policy_and_nothing_is_recorded(opened):
    async with opened("ok") as desk:
        first = await desk.openai.responses.create(model="m", input="Hi")
        counted = await desk.openai.responses.input_tokens.count(
            model="m", input="And now?", previous_response_id=first.id
        )
        assert len(desk.calls) == 1
        await desk.openai.responses.create(model="m", input="And now?", previous_response_id=first.id)
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", len(desk.calls[1].prompt_ids))
