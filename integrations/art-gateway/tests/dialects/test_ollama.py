"""Ollama's API through the capture server, with Ollama's client."""

import asyncio

import ollama
import pytest

HI = [{"role": "user", "content": "Hi"}]


def client_of(desk) -> ollama.AsyncClient:
    return ollama.AsyncClient(host=desk.url.removesuffix("/v1"))


async def test_an_answer_is_that_of_chat_and_is_recorded_like_it(opened):
    async with opened("Hello.") as desk, client_of(desk) as client:
        options = {"temperature": 0.5, "num_predict": 9, "num_ctx": 4096}
        answer = await client.chat("m", HI, options=options)
        assert (answer.message.content, answer.done_reason, answer.model) == ("Hello.", "stop", "m")
        assert desk.all_recorded(1)
        [call] = desk.calls
        assert (answer.prompt_eval_count, answer.eval_count) == (len(call.prompt_ids), len(call.sampled_ids))
        assert desk.engine.requests[0]["max_completion_tokens"] == 9
        assert "num_ctx" not in desk.engine.requests[0]
        assert await desk.same_as_chat(messages=HI, temperature=0.5)


async def test_a_penalty_reaches_the_engine_unless_it_is_off(opened):
    async with opened("Hello.") as desk, client_of(desk) as client:
        for penalty in (1.1, 1.0, 0):  # LiteLLM sends an agent's frequency_penalty=0 as 0
            await client.chat("m", HI, options={"repeat_penalty": penalty, "min_p": 0.1})
        assert [request.get("repetition_penalty") for request in desk.engine.requests] == [1.1, None, None]
        assert {request["min_p"] for request in desk.engine.requests} == {0.1}


async def test_a_stream_has_the_same_text_with_both_clients(opened):
    async with opened("Hello, hello.") as desk, client_of(desk) as client:
        parts = [part async for part in await client.chat("m", HI, stream=True)]
        assert "".join(part.message.content for part in parts) == "Hello, hello."
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]

        def ask() -> str:
            with ollama.Client(host=desk.url) as client:
                return "".join(part.message.content for part in client.chat("m", HI, stream=True))

        assert await asyncio.to_thread(ask) == "Hello, hello."
        assert desk.all_recorded(2)


async def test_tools_make_the_round_trip_with_their_results(opened, two_calls, chat_tool):
    for stream in (False, True):
        async with opened(two_calls, "Both sunny.") as desk, client_of(desk) as client:
            question = {"role": "user", "content": "Weather?"}
            if stream:
                parts = [
                    part.message async for part in await client.chat("m", [question], tools=[chat_tool], stream=True)
                ]
                [message] = [part for part in parts if part.tool_calls]
                message.content = "".join(part.content for part in parts)
            else:
                message = (await client.chat("m", [question], tools=[chat_tool])).message
            assert [call.function.arguments for call in message.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]
            results = [{"role": "tool", "tool_name": "weather", "content": text} for text in ("sun", "rain")]
            await client.chat("m", [question, message, *results])
            assert desk.all_recorded(2)
            assert desk.engine.requests[0]["tools"][0]["function"]["name"] == "weather"
            first, second = desk.engine.requests[1]["messages"][1]["tool_calls"]
            assert [call["function"] for call in (first, second)] == [
                call["function"] for call in two_calls["tool_calls"]
            ]
            assert [
                (result["tool_call_id"], result["content"]) for result in desk.engine.requests[1]["messages"][2:]
            ] == [(first["id"], "sun"), (second["id"], "rain")]


async def test_thinking_is_shown_and_comes_back(opened):
    async with opened({"content": "Rome.", "reasoning_content": "Which one?"}) as desk, client_of(desk) as client:
        message = (await client.chat("m", HI, think=True)).message
        assert (message.thinking, message.content) == ("Which one?", "Rome.")
        await client.chat("m", [*HI, message, *HI], think="low")
        assert desk.engine.requests[0]["chat_template_kwargs"] == {"enable_thinking": True}
        assert desk.engine.requests[1]["reasoning_effort"] == "low"
        assert desk.engine.requests[1]["messages"][1]["reasoning_content"] == "Which one?"


async def test_a_format_asks_for_an_answer_in_its_form(opened, city_schema):
    async with opened('{"city": "Rome"}') as desk, client_of(desk) as client:
        await client.chat("m", HI, format=city_schema)
        await client.chat("m", HI, format="json")
        schema, plain = [request["response_format"] for request in desk.engine.requests]
        assert schema["json_schema"]["schema"] == city_schema
        assert plain == {"type": "json_object"}


async def test_images_are_those_of_chat(opened):
    async with opened("A cat.") as desk, client_of(desk) as client:
        message = {"role": "user", "content": "What?", "images": [b"\x89PNG\r\n", b"\xff\xd8\xff\xe0"]}
        await client.chat("m", [message])
        text, *images = desk.engine.requests[0]["messages"][0]["content"]
        assert text == {"type": "text", "text": "What?"}
        assert [image["image_url"]["url"].partition(";")[0] for image in images] == [
            "data:image/png",
            "data:image/jpeg",
        ]


async def test_a_refusal_is_an_error_of_the_client(opened):
    async with opened("Hello.") as desk, client_of(desk) as client:
        with pytest.raises(ollama.ResponseError, match="'messages' must be a list") as refusal:
            await client.chat("m", [])
        assert refusal.value.status_code == 400


async def test_a_result_whose_call_the_client_leaves_out_is_shown(opened):
    async with opened("Sunny.") as desk, client_of(desk) as client:
        await client.chat("m", [*HI, {"role": "tool", "content": "sun"}])
        assert desk.engine.requests[0]["messages"][1] == {"role": "tool", "tool_call_id": "call_0", "content": "sun"}
