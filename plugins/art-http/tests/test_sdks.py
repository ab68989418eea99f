"""SDKs that have no plugin of their own keep every rule of an adapter."""

import asyncio
import json

import anthropic
import boto3
import ollama
import pytest
from google import genai
from google.genai import types as genai_types
from google.oauth2.credentials import Credentials

import art_http
from art_core.testing import check_adapter
from framework_table import City, agents_of, assert_documented, collected, rain, user

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
    @classmethod
    def client(cls, base_url):
        return genai.Client(api_key="k", http_options=genai_types.HttpOptions(base_url=base_url))

    @classmethod
    def blocking(cls, base_url):
        def agent(text):
            with cls.client(base_url) as client:
                return client.models.generate_content(model="m", contents=text).text

        return agent

    @classmethod
    def asynchronous(cls, base_url, **config):
        async def agent(text):
            async with cls.client(base_url).aio as client:
                return (await client.models.generate_content(model="m", contents=text, config=config)).text

        return agent

    @classmethod
    def streaming(cls, base_url):
        async def agent(text):
            async with cls.client(base_url).aio as client:
                parts = await client.models.generate_content_stream(model="m", contents=text)
                return "".join([part.text or "" async for part in parts])

        return agent

    @classmethod
    def with_tools(cls, base_url):
        async def agent(text):
            async with cls.client(base_url).aio as client:
                # The client runs the tool, and asks again with its result.
                chat = client.chats.create(model="m", config={"tools": [rain]})
                return (await chat.send_message(text)).text

        return agent

    @classmethod
    def structured(cls, base_url):
        return cls.asynchronous(base_url, response_mime_type="application/json", response_schema=City)


class VertexAgents(GenaiAgents):
    @classmethod
    def client(cls, base_url):
        options = genai_types.HttpOptions(base_url=base_url)
        credentials = Credentials("token")
        return genai.Client(
            vertexai=True, project="p", location="europe-west1", credentials=credentials, http_options=options
        )


class BedrockAgents:
    @staticmethod
    def asker(base_url, **options):
        client = boto3.Session().client("bedrock-runtime", "us-east-1", endpoint_url=base_url)
        return lambda messages: client.converse(modelId="m", messages=messages, **options)["output"]["message"]

    @staticmethod
    def blocking(base_url, **options):
        ask = BedrockAgents.asker(base_url, **options)
        return lambda text: ask([said_by_user(text)])["content"][0]["text"]

    @staticmethod
    def asynchronous(base_url, **options):
        # boto3 has no client for coroutines.
        ask = BedrockAgents.blocking(base_url, **options)

        async def agent(text):
            return await asyncio.to_thread(ask, text)

        return agent

    @staticmethod
    def streaming(base_url):
        client = boto3.Session().client("bedrock-runtime", "us-east-1", endpoint_url=base_url)

        def agent(text):
            events = client.converse_stream(modelId="m", messages=[said_by_user(text)])["stream"]
            deltas = [event["contentBlockDelta"]["delta"] for event in events if "contentBlockDelta" in event]
            return "".join(delta["text"] for delta in deltas)

        return agent

    @staticmethod
    def with_tools(base_url):
        spec = {"name": "rain", "description": "Tell the weather.", "inputSchema": {"json": TOOL["input_schema"]}}
        ask = BedrockAgents.asker(base_url, toolConfig={"tools": [{"toolSpec": spec}]})

        def agent(text):
            messages = [said_by_user(text)]
            while True:
                message = ask(messages)
                calls = [block["toolUse"] for block in message["content"] if "toolUse" in block]
                if not calls:
                    return message["content"][0]["text"]
                results = [
                    {"toolUseId": call["toolUseId"], "content": [{"text": rain(**call["input"])}]} for call in calls
                ]
                messages += [message, {"role": "user", "content": [{"toolResult": result} for result in results]}]

        return agent

    @staticmethod
    def structured(base_url):
        schema = {"jsonSchema": {"schema": json.dumps(City.model_json_schema())}}
        form = {"textFormat": {"type": "json_schema", "structure": schema}}
        return BedrockAgents.blocking(base_url, outputConfig=form)


def said_by_user(text):
    return {"role": "user", "content": [{"text": text}]}


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


SDKS = {
    "Anthropic client": AnthropicAgents,
    "google-genai": GenaiAgents,
    "google-genai, Vertex AI": VertexAgents,
    "Ollama client": OllamaAgents,
    "boto3, Bedrock Converse": BedrockAgents,
}


@pytest.mark.system
@pytest.mark.filterwarnings("ignore:Inheritance class AiohttpClientSession:DeprecationWarning")  # google-genai's
@pytest.mark.parametrize("sdk", SDKS)
@pytest.mark.usefixtures("trap_network")
async def test_agents_with_this_sdk_keep_every_rule_of_an_adapter(sdk):
    packages, of = {"anthropic", "boto3", "google", "ollama"}, SDKS[sdk]
    agents = agents_of(of.asynchronous, of.blocking, of.streaming)
    agents |= {"tools": of.with_tools, "structured output": of.structured}
    assert_documented(await check_adapter(agents, framework=sdk, plugin=art_http, packages=packages))


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_tool_runner_of_anthropics_sdk_sends_whole_conversations(tmp_path, streamed):
    async def agent(text):
        async with AnthropicAgents.client("http://claude.invalid/v1") as client:
            asked = {
                "model": "m",
                "max_tokens": 64,
                "messages": user(text),
                "tools": [anthropic.beta_async_tool(forecast)],
            }
            runner = client.beta.messages.tool_runner(**asked, stream=streamed)
            return (await runner.until_done()).content[0].text

    async def forecast(city: str) -> str:
        """Tell the weather."""
        return rain(city)

    for trajectory in await collected(tmp_path, agent):
        assert (trajectory.error, trajectory.output) == (None, "answer to task-000")
        roles = [[message["role"] for message in call.request["messages"]] for call in trajectory.calls]
        assert roles == [["user"], ["user", "assistant", "tool"]]


async def test_the_tool_runner_of_anthropics_sdk_runs_synchronously(tmp_path):
    def agent(text):
        with AnthropicAgents.client("http://claude.invalid/v1", anthropic.Anthropic) as client:
            asked = {"model": "m", "max_tokens": 64, "messages": user(text), "tools": [anthropic.beta_tool(rain)]}
            return client.beta.messages.tool_runner(**asked).until_done().content[0].text

    for trajectory in await collected(tmp_path, agent):
        assert (trajectory.error, trajectory.output, len(trajectory.calls)) == (None, "answer to task-000", 2)
