"""``/v1/messages`` through the capture server, with Anthropic's client."""

import asyncio

import anthropic
import pytest

from art_core.errors import UpstreamError

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def tool(city_schema):
    return {"name": "weather", "description": "Tells.", "input_schema": city_schema}


async def test_an_answer_is_that_of_chat_and_is_recorded_like_it(opened):
    async with opened("Hello.") as desk:
        message = await desk.anthropic.messages.create(model="m", max_tokens=9, system="Be brief.", messages=HI)
        assert [block.text for block in message.content] == ["Hello."]
        assert (message.type, message.role, message.stop_reason, message.stop_sequence) == (
            "message",
            "assistant",
            "end_turn",
            None,
        )
        assert desk.all_recorded(1)
        [call] = desk.calls
        assert (message.usage.input_tokens, message.usage.output_tokens) == (
            len(call.prompt_ids),
            len(call.sampled_ids),
        )
        assert desk.engine.requests[0]["max_completion_tokens"] == 9
        assert await desk.same_as_chat(messages=[{"role": "system", "content": "Be brief."}, *HI])


async def test_the_sync_client_is_answered_too(opened):
    async with opened("Hello.") as desk:

        def ask() -> str:
            with anthropic.Anthropic(base_url=desk.url, api_key="none", max_retries=0) as client:
                text = client.messages.create(model="m", max_tokens=9, messages=HI).content[0].text
                with client.messages.stream(model="m", max_tokens=9, messages=HI) as stream:
                    return text + "".join(stream.text_stream)

        assert await asyncio.to_thread(ask) == "Hello.Hello."
        assert desk.all_recorded(2)


async def test_the_address_is_taken_with_and_without_its_v1(opened):
    async with opened("Hello.") as desk:
        for url in (desk.url, desk.url.removesuffix("/v1")):
            async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
                await client.messages.create(model="m", max_tokens=9, messages=HI)
        assert desk.all_recorded(2)


async def test_a_stream_ends_in_the_message_that_is_given_without_streaming(opened, two_calls, tool):
    async with opened(two_calls) as desk:
        asked = {"model": "m", "max_tokens": 9, "messages": HI, "tools": [tool]}
        async with desk.anthropic.messages.stream(**asked) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_message()
        whole = await desk.anthropic.messages.create(**asked)
        assert "".join(event.text for event in events if event.type == "text") == "Let me look."
        assert [block.type for block in streamed.content] == ["text", "tool_use", "tool_use"]
        assert [block.input for block in streamed.content[1:]] == [{"city": "Paris"}, {"city": "Rome"}]
        hidden = {"id", "parsed_output"}
        mine, other = (m.model_dump(exclude=hidden, exclude_none=True) for m in (streamed, whole))
        for block in mine["content"]:
            block.pop("parsed_output", None)
        assert mine == other
        assert streamed.stop_reason == "tool_use"
        assert desk.all_recorded(2)


async def test_tools_make_the_round_trip_with_their_results(opened, two_calls, tool, chat_tool):
    async with opened(two_calls, "One sunny.", "One sunny.") as desk:
        create = desk.anthropic.messages.create
        question = {"role": "user", "content": "Weather?"}
        first = await create(model="m", max_tokens=9, messages=[question], tools=[tool])
        paris, rome = [block for block in first.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": paris.id, "content": [{"type": "text", "text": "sun"}]},
            {"type": "tool_result", "tool_use_id": rome.id, "content": "no such city", "is_error": True},
            {"type": "text", "text": "Go on."},
        ]
        history = [question, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        second = await create(model="m", max_tokens=9, messages=history, tools=[tool])
        assert second.content[0].text == "One sunny."
        assert desk.all_recorded(2)
        messages = [
            question,
            {"role": "assistant", **two_calls},
            {"role": "tool", "tool_call_id": "call_0", "content": "sun"},
            {"role": "tool", "tool_call_id": "call_1", "content": "Error: no such city"},
            {"role": "user", "content": "Go on."},
        ]
        assert await desk.same_as_chat(messages=messages, tools=[chat_tool])


async def test_arguments_come_back_as_they_were_sampled(opened, tool):
    """Compact JSON, and JSON that is broken: the next prompt must show what was sampled, not what a parser made of it."""
    sampled = ['{"city":"Paris"}', '{"city": "Pa', "", "[1]", '{"big": 123456789012345678901234567890}']
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        for i, arguments in enumerate(sampled)
    ]
    async with opened({"content": None, "tool_calls": calls}) as desk:
        for stream in (False, True):
            asked = {"model": "m", "max_tokens": 9, "tools": [tool]}
            if stream:
                async with desk.anthropic.messages.stream(messages=HI, **asked) as events:
                    first = await events.get_final_message()
            else:
                first = await desk.anthropic.messages.create(messages=HI, **asked)
            inputs = [block.input for block in first.content]
            assert inputs[:3] == [{"city": "Paris"}, {"INVALID_JSON": '{"city": "Pa'}, {}]
            results = [{"type": "tool_result", "tool_use_id": block.id, "content": "?"} for block in first.content]
            history = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
            await desk.anthropic.messages.create(messages=history, **asked)
            said = desk.engine.requests[-1]["messages"][1]["tool_calls"]
            assert [call["function"]["arguments"] for call in said] == sampled


@pytest.mark.parametrize("stream", [False, True])
async def test_conversations_whose_server_numbers_its_calls_share_no_spelling(opened, tool, stream):
    """Each is shown its own arguments, with the ids that the server gave."""
    spellings = ['{"city":"Paris"}', '{"city": "Paris"}', '{"city" : "Paris"}']
    call = {"id": "functions.weather:0", "type": "function", "function": {"name": "weather"}}
    replies = [
        {"content": None, "tool_calls": [{**call, "function": {"name": "weather", "arguments": spelling}}]}
        for spelling in spellings
    ]
    async with opened(*replies) as desk:
        asked, answers = {"model": "m", "max_tokens": 9, "tools": [tool]}, []
        for _ in spellings:
            if stream:
                async with desk.anthropic.messages.stream(messages=HI, **asked) as events:
                    answers.append(await events.get_final_message())
            else:
                answers.append(await desk.anthropic.messages.create(messages=HI, **asked))
        for answer, spelling in zip(answers, spellings, strict=True):
            result = {"type": "tool_result", "tool_use_id": answer.content[0].id, "content": "sun"}
            said = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
            await desk.anthropic.messages.create(messages=[*HI, *said], **asked)
            _, assistant, told = desk.engine.requests[-1]["messages"]
            assert assistant["tool_calls"] == [{**call, "function": {"name": "weather", "arguments": spelling}}]
            assert told["tool_call_id"] == call["id"]


@pytest.mark.parametrize(
    ("choice", "in_chat"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "weather"},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
    ],
)
async def test_the_choice_of_tools_reaches_the_engine(opened, tool, chat_tool, choice, in_chat):
    async with opened("ok") as desk:
        await desk.anthropic.messages.create(model="m", max_tokens=9, messages=HI, tools=[tool], tool_choice=choice)
        [request] = desk.engine.requests
        assert request["tools"] == [chat_tool]
        assert {key: request[key] for key in in_chat} == in_chat


async def test_settings_reach_the_engine_under_their_names_in_chat(opened, city_schema):
    async with opened("ok") as desk:
        await desk.anthropic.messages.create(
            model="m",
            max_tokens=9,
            messages=HI,
            stop_sequences=["END"],
            thinking={"type": "disabled"},
            output_config={"format": {"type": "json_schema", "schema": city_schema}, "effort": "low"},
            metadata={"user_id": "u"},
            extra_body={"temperature": 0.5, "top_k": 3, "min_p": 0.1},
        )
        assert desk.engine.requests[0] == {
            "model": "m",
            "messages": HI,
            "max_completion_tokens": 9,
            "stop": ["END"],
            "chat_template_kwargs": {"enable_thinking": False},
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "output", "schema": city_schema, "strict": True},
            },
            "reasoning_effort": "low",
            "temperature": 0.5,
            "top_k": 3,
            "min_p": 0.1,
        }


async def test_images_are_kept(opened):
    async with opened("A cat.") as desk:
        sources = [
            {"type": "base64", "media_type": "image/png", "data": "AAAA"},
            {"type": "url", "url": "http://127.0.0.1/cat.png"},
        ]
        content = [{"type": "image", "source": source} for source in sources]
        await desk.anthropic.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": content}])
        [message] = desk.engine.requests[0]["messages"]
        assert [part["image_url"]["url"] for part in message["content"]] == [
            "data:image/png;base64,AAAA",
            "http://127.0.0.1/cat.png",
        ]


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124.*input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]}, "defer_loading"),
        ({"container": "c"}, "container.*in the agent"),
        ({"extra_body": {"mcp_servers": [{"url": "http://127.0.0.1"}]}}, "mcp_servers"),
        ({"extra_body": {"context_management": {"edits": [{"type": "compact_20260112"}]}}}, "compact_20260112"),
        ({"extra_body": {"output_config": {"task_budget": {"total": 5}}}}, "task_budget"),
        ({"messages": [*HI, {"role": "assistant", "content": "He"}]}, "prefilled"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file"}}]}]}, "image"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, *HI]},
            "redacted_thinking",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role 'tool'"),
        ({"tool_choice": {"type": "maybe"}}, "auto, any, tool or none"),
    ],
)
async def test_what_cannot_be_translated_is_refused_by_name(opened, what, named):
    async with opened("ok") as desk:
        with pytest.raises(anthropic.BadRequestError, match=named) as refusal:
            await desk.anthropic.messages.create(**{"model": "m", "max_tokens": 9, "messages": HI, **what})
        assert refusal.value.response.headers["x-should-retry"] == "false"
        assert desk.calls == desk.engine.requests == []


async def test_an_upstream_error_before_a_stream_is_raised_by_the_client(opened):
    def fail(request):
        raise UpstreamError("the context is too long", status=400, code="context_length_exceeded")

    async with opened(fail) as desk:
        with pytest.raises(anthropic.BadRequestError, match="too long"):
            async with desk.anthropic.messages.stream(model="m", max_tokens=9, messages=HI) as stream:
                await stream.until_done()


async def test_edits_that_leave_out_old_parts_have_no_effect(opened):
    async with opened("ok") as desk:
        edits = [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}]
        await desk.anthropic.beta.messages.create(
            model="m", max_tokens=9, messages=HI, context_management={"edits": edits}
        )
        assert desk.all_recorded(1)
        assert "context_management" not in desk.engine.requests[0]


async def test_tokens_are_counted_by_the_policy_and_nothing_is_recorded(opened, tool):
    async with opened("ok") as desk:
        asked = {"model": "m", "messages": HI, "tools": [tool], "tool_choice": {"type": "any"}}
        counted = await desk.anthropic.messages.count_tokens(**asked)
        assert not desk.calls
        assert (desk.engine.requests[0]["max_completion_tokens"], desk.engine.requests[0].get("tool_choice")) == (
            1,
            None,
        )
        await desk.anthropic.messages.create(max_tokens=9, **asked)
        assert counted.input_tokens == len(desk.calls[0].prompt_ids)


async def test_counting_is_refused_as_the_request_would_be(opened):
    async with opened("ok") as desk:
        with pytest.raises(anthropic.BadRequestError, match="document"):
            await desk.anthropic.messages.count_tokens(
                model="m", messages=[{"role": "user", "content": [{"type": "document", "source": {}}]}]
            )


async def test_claude_code_names_who_is_calling(opened):
    async with opened("ok") as desk:
        for kind in ("main", "subagent", None):
            headers = {"x-claude-code-request-class": kind} if kind else {}
            await desk.anthropic.messages.create(model="m", max_tokens=9, messages=HI, extra_headers=headers)
        assert [call.agent for call in desk.calls] == ["main", "subagent", None]
