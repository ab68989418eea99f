"""Gemini's API through the capture server, with Google's client."""

import asyncio
import base64

import pytest
from google import genai
from google.genai import errors, types
from google.oauth2.credentials import Credentials
from pydantic import BaseModel

# Google's client derives a class from aiohttp's, which warns.
pytestmark = pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")

HI = [{"role": "user", "content": "Hi"}]


def client_of(desk, **options) -> genai.Client:
    return genai.Client(api_key="none", http_options=types.HttpOptions(base_url=desk.url, **options))


async def test_an_answer_is_that_of_chat_and_is_recorded_like_it(opened):
    async with opened("Hello.") as desk, client_of(desk).aio as client:
        config = {"system_instruction": "Be brief.", "max_output_tokens": 9, "top_k": 4, "temperature": 0.5}
        answer = await client.models.generate_content(model="gemini-m", contents="Hi", config=config)
        assert (answer.text, answer.candidates[0].finish_reason) == ("Hello.", "STOP")
        assert desk.all_recorded(1)
        [call] = desk.calls
        assert answer.usage_metadata.prompt_token_count == len(call.prompt_ids)
        assert answer.usage_metadata.candidates_token_count == len(call.sampled_ids)
        [request] = desk.engine.requests
        assert (request["model"], request["max_completion_tokens"], request["top_k"]) == ("gemini-m", 9, 4)
        messages = [{"role": "system", "content": "Be brief."}, *HI]
        assert await desk.same_as_chat(messages=messages, temperature=0.5)


async def test_the_sync_client_is_answered_too(opened):
    async with opened("Hello.") as desk:

        def ask() -> str:
            with client_of(desk) as client:
                text = client.models.generate_content(model="m", contents="Hi").text
                return text + "".join(
                    part.text for part in client.models.generate_content_stream(model="m", contents="Hi")
                )

        assert await asyncio.to_thread(ask) == "Hello.Hello."
        assert desk.all_recorded(2)


async def test_the_address_is_taken_with_and_without_its_v1(opened):
    async with opened("Hello.") as desk:
        for url in (desk.url, f"{desk.url}/", desk.url.removesuffix("/v1")):
            options = types.HttpOptions(base_url=url)
            async with genai.Client(api_key="none", http_options=options).aio as client:
                await client.models.generate_content(model="models/m", contents="Hi")
        assert desk.all_recorded(3)
        assert {request["model"] for request in desk.engine.requests} == {"m"}


@pytest.mark.parametrize("place", [{"project": "p", "location": "global"}, {"api_key": "express"}])
async def test_vertex_ai_is_answered_at_the_same_address(opened, place):
    async with opened("Hello.") as desk:
        key = {} if "api_key" in place else {"credentials": Credentials("token")}
        for url in (desk.url, desk.url.removesuffix("/v1")):
            options = types.HttpOptions(base_url=url)
            async with genai.Client(vertexai=True, http_options=options, **key, **place).aio as client:
                parts = await client.models.generate_content_stream(model="gemini-m", contents="Hi")
                assert "".join([part.text async for part in parts]) == "Hello."
                await client.models.generate_content(model="gemini-m", contents="Hi")
                counted = await client.models.count_tokens(model="gemini-m", contents="Hi")
                assert counted.total_tokens == len(desk.calls[-1].prompt_ids)
        assert len(desk.calls) == 4 and {call.request["model"] for call in desk.calls} == {"gemini-m"}


async def test_a_chat_with_tools_that_run_by_themselves_is_recorded_turn_by_turn(opened, two_calls, chat_tool):
    def weather(city: str) -> str:
        """Tells."""
        return f"sun in {city}"

    for stream in (False, True):
        async with opened(two_calls, "Both sunny.", "Thanks.") as desk, client_of(desk).aio as client:
            chat = client.chats.create(model="m", config={"tools": [weather]})
            for text in ("Weather?", "Thank you."):
                if stream:
                    async for _ in await chat.send_message_stream(text):
                        pass
                else:
                    await chat.send_message(text)
            assert desk.all_recorded(3)
            function = desk.engine.requests[0]["tools"][0]["function"]
            assert (function["name"], function["description"]) == ("weather", "Tells.")
            assert function["parameters"]["properties"]["city"]["type"] == "string"
            assert desk.engine.requests[2]["messages"] == [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", **two_calls},
                {"role": "tool", "tool_call_id": "call_0", "content": "sun in Paris"},
                {"role": "tool", "tool_call_id": "call_1", "content": "sun in Rome"},
                {"role": "assistant", "content": "Both sunny."},
                {"role": "user", "content": "Thank you."},
            ]


async def test_a_forced_tool_is_forced_and_a_declaration_keeps_its_schema(opened, two_calls, city_schema, chat_tool):
    async with opened(two_calls) as desk, client_of(desk).aio as client:
        declared = {"name": "weather", "description": "Tells.", "parameters_json_schema": city_schema}
        forced = {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["weather"]}}
        config = {"tools": [{"function_declarations": [declared]}], "tool_config": forced}
        answer = await client.models.generate_content(model="m", contents="Weather?", config=config)
        assert [(call.id, call.name, call.args) for call in answer.function_calls] == [
            ("call_0", "weather", {"city": "Paris"}),
            ("call_1", "weather", {"city": "Rome"}),
        ]
        assert desk.engine.requests[0]["tools"] == [chat_tool]
        assert desk.engine.requests[0]["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


class City(BaseModel):
    name: str
    rivers: list[str] | None = None


async def test_a_schema_asks_for_an_answer_in_its_form(opened):
    async with opened('{"name": "Rome"}') as desk, client_of(desk).aio as client:
        config = {"response_mime_type": "application/json", "response_schema": City}
        answer = await client.models.generate_content(model="m", contents="Which?", config=config)
        assert answer.parsed == City(name="Rome")
        form = desk.engine.requests[0]["response_format"]
        assert form["type"] == "json_schema"
        properties = form["json_schema"]["schema"]["properties"]
        assert properties["name"]["type"] == "string"
        assert properties["rivers"]["type"] == ["array", "null"]


async def test_thoughts_are_shown_if_asked_for_and_come_back_either_way(opened):
    reply = {"content": "Rome.", "reasoning_content": "Which one?"}
    for shown in (True, False):
        async with opened(reply) as desk, client_of(desk).aio as client:
            thinking = {"include_thoughts": shown, "thinking_budget": 100}
            chat = client.chats.create(model="m", config={"thinking_config": thinking})
            answer = await chat.send_message("Which?")
            parts = [(part.text, bool(part.thought)) for part in answer.candidates[0].content.parts]
            assert parts == [("Which one?", True)] * shown + [("Rome.", False)]
            for text in ("Sure?", "Really?"):
                await chat.send_message(text)
            assert [message.get("reasoning_content") for message in desk.engine.requests[2]["messages"]] == [
                None,
                "Which one?",
                None,
                "Which one?",
                None,
            ]
            assert desk.engine.requests[0]["chat_template_kwargs"] == {"enable_thinking": True}


async def test_candidates_and_images_are_those_of_chat(opened):
    async with opened("Hello.") as desk, client_of(desk).aio as client:
        image = types.Part.from_bytes(data=b"\x89PNG", mime_type="image/png")
        answer = await client.models.generate_content(
            model="m", contents=["What is it?", image], config={"candidate_count": 2}
        )
        assert [candidate.content.parts[0].text for candidate in answer.candidates] == ["Hello.", "Hello."]
        assert [call.choice for call in desk.calls] == [0, 1]
        url = "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()
        assert desk.engine.requests[0]["messages"][0]["content"] == [
            {"type": "text", "text": "What is it?"},
            {"type": "image_url", "image_url": {"url": url}},
        ]


async def test_tokens_are_counted_by_the_policy_and_nothing_is_recorded(opened):
    async with opened("Hello, hello.") as desk, client_of(desk).aio as client:
        counted = await client.models.count_tokens(model="m", contents="Hi")
        assert not desk.calls
        await client.models.generate_content(model="m", contents="Hi")
        assert counted.total_tokens == len(desk.calls[0].prompt_ids)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tools": [{"google_search": {}}]}, "'googleSearch' can't be translated.*declare a function"),
        ({"cached_content": "x"}, "'cachedContent' can't be translated"),
        ({"response_modalities": ["AUDIO"]}, "'AUDIO'"),
    ],
)
async def test_what_runs_at_google_is_refused_by_name(opened, config, message):
    async with opened("Hello.") as desk, client_of(desk).aio as client:
        with pytest.raises(errors.ClientError, match=message) as refusal:
            await client.models.generate_content(model="m", contents="Hi", config=config)
        assert (refusal.value.code, refusal.value.status) == (400, "INVALID_ARGUMENT")
        assert not desk.calls


async def test_a_result_without_a_call_is_refused(opened):
    async with opened("Hello.") as desk, client_of(desk).aio as client:
        part = types.Part.from_function_response(name="weather", response={"result": "sun"})
        with pytest.raises(errors.ClientError, match="'weather' follows no functionCall of this name"):
            await client.models.generate_content(model="m", contents=types.Content(role="user", parts=[part]))
