"""SDKs that have no plugin of their own keep every rule of an adapter."""

import anthropic
import ollama
import pytest
from google import genai
from google.genai import types as genai_types

import art_http
from art_core.testing import check_adapter
from framework_table import City, agents_of, assert_documented, rain, user

TOOL = {
    "name": "rain",
    "description": "Tell the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class AnthropicAgents:
    @staticmethod
    def client(base_url, kind=anthropic.AsyncAnthropic):
        return kind(api_key="k", base_url=base_url.removesuffix("/v1"), max_retries=0)

    @staticmethod
    def blocking(base_url):
        def agent(text):
            with AnthropicAgents.client(base_url, anthropic.Anthropic) as client:
                return client.messages.create(model="m", max_tokens=64, messages=user(text)).content[0].text

        return agent

    @staticmethod
    def asynchronous(base_url, **options):
        async def agent(text):
            async with AnthropicAgents.client(base_url) as client:
                asked = {"model": "m", "max_tokens": 64, "messages": user(text), **options}
                return (await client.messages.create(**asked)).content[0].text

        return agent

    @staticmethod
    def streaming(base_url):
        async def agent(text):
            asked = {"model": "m", "max_tokens": 64, "messages": user(text)}
            async with AnthropicAgents.client(base_url) as client, client.messages.stream(**asked) as stream:
                return "".join([piece async for piece in stream.text_stream])

        return agent

    @staticmethod
    def with_tools(base_url):
        async def agent(text):
            messages = user(text)
            async with AnthropicAgents.client(base_url) as client:
                while True:
                    asked = {"model": "m", "max_tokens": 64, "messages": messages, "tools": [TOOL]}
                    answer = await client.messages.create(**asked)
                    calls = [block for block in answer.content if block.type == "tool_use"]
                    if not calls:
                        return answer.content[0].text
                    results = [
                        {"type": "tool_result", "tool_use_id": call.id, "content": rain(**call.input)} for call in calls
                    ]
                    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]

        return agent

    @staticmethod
    def structured(base_url):
        schema = City.model_json_schema() | {"additionalProperties": False}
        return AnthropicAgents.asynchronous(
            base_url, output_config={"format": {"type": "json_schema", "schema": schema}}
        )


class GenaiAgents:
    @staticmethod
    def client(base_url):
        return genai.Client(api_key="k", http_options=genai_types.HttpOptions(base_url=base_url))

    @staticmethod
    def blocking(base_url):
        def agent(text):
            with GenaiAgents.client(base_url) as client:
                return client.models.generate_content(model="m", contents=text).text

        return agent

    @staticmethod
    def asynchronous(base_url, **config):
        async def agent(text):
            async with GenaiAgents.client(base_url).aio as client:
                return (await client.models.generate_content(model="m", contents=text, config=config)).text

        return agent

    @staticmethod
    def streaming(base_url):
        async def agent(text):
            async with GenaiAgents.client(base_url).aio as client:
                parts = await client.models.generate_content_stream(model="m", contents=text)
                return "".join([part.text or "" async for part in parts])

        return agent

    @staticmethod
    def with_tools(base_url):
        async def agent(text):
            async with GenaiAgents.client(base_url).aio as client:
                # The client runs the tool, and asks again with its result.
                chat = client.chats.create(model="m", config={"tools": [rain]})
                return (await chat.send_message(text)).text

        return agent

    @staticmethod
    def structured(base_url):
        return GenaiAgents.asynchronous(base_url, response_mime_type="application/json", response_schema=City)


class OllamaAgents:
    @staticmethod
    def blocking(base_url):
        def agent(text):
            with ollama.Client(base_url) as client:
                return client.chat("m", user(text)).message.content

        return agent

    @staticmethod
    def asynchronous(base_url, **options):
        async def agent(text):
            async with ollama.AsyncClient(base_url) as client:
                return (await client.chat("m", user(text), **options)).message.content

        return agent

    @staticmethod
    def streaming(base_url):
        async def agent(text):
            async with ollama.AsyncClient(base_url) as client:
                parts = await client.chat("m", user(text), stream=True)
                return "".join([part.message.content async for part in parts])

        return agent

    @staticmethod
    def with_tools(base_url):
        async def agent(text):
            messages = user(text)
            async with ollama.AsyncClient(base_url) as client:
                while (message := (await client.chat("m", messages, tools=[rain])).message).tool_calls:
                    messages.append(message)
                    for call in message.tool_calls:
                        result = rain(**call.function.arguments)
                        messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
            return message.content

        return agent

    @staticmethod
    def structured(base_url):
        return OllamaAgents.asynchronous(base_url, format=City.model_json_schema())


SDKS = {"Anthropic client": AnthropicAgents, "google-genai": GenaiAgents, "Ollama client": OllamaAgents}


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")  # google-genai's
@pytest.mark.parametrize("sdk", SDKS)
@pytest.mark.usefixtures("trap_network")
async def test_agents_with_this_sdk_keep_every_rule_of_an_adapter(sdk):
    packages, of = {"anthropic", "google", "ollama"}, SDKS[sdk]
    agents = agents_of(of.asynchronous, of.blocking, of.streaming)
    agents |= {"tools": of.with_tools, "structured output": of.structured}
    assert_documented(await check_adapter(agents, framework=sdk, plugin=art_http, packages=packages))
