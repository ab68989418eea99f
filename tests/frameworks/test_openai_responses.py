"""Functions that use the Responses API of the OpenAI client keep every rule of an adapter."""

import json

import openai
import pytest

import art_openai
from art_core.testing import check_adapter
from framework_table import City, assert_documented, failing, nested, rain, threaded

pytestmark = pytest.mark.system

TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def blocking(base_url):
    client = openai.OpenAI(api_key="k", base_url=base_url, max_retries=0)
    return lambda text: client.responses.create(model="m", input=text).output_text


def client_of(base_url):
    return openai.AsyncOpenAI(api_key="k", base_url=base_url, max_retries=0)


def asynchronous(base_url):
    client = client_of(base_url)

    async def agent(text):
        return (await client.responses.create(model="m", input=text)).output_text

    return agent


def streaming(base_url):
    client = client_of(base_url)

    async def agent(text):
        stream = await client.responses.create(model="m", input=text, stream=True)
        return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    return agent


def with_tools(base_url):
    client = client_of(base_url)

    async def agent(text):
        items = [{"role": "user", "content": text}]
        while True:
            answer = await client.responses.create(model="m", input=items, tools=[TOOL])
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text
            items += answer.output
            for call in calls:
                output = rain(json.loads(call.arguments)["city"])
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})

    return agent


def structured(base_url):
    client = client_of(base_url)

    async def agent(text):
        return (await client.responses.parse(model="m", input=text, text_format=City)).output_parsed

    return agent


@pytest.mark.smoke
@pytest.mark.usefixtures("trap_network")
async def test_functions_that_use_the_responses_api_keep_every_rule():
    agents = {
        "sync": blocking,
        "async": asynchronous,
        "stream": streaming,
        "tools": with_tools,
        "structured output": structured,
        "threads": threaded(blocking),
        "nested agents": nested(asynchronous, with_tools),
        "failing": failing(asynchronous),
    }
    assert_documented(
        await check_adapter(agents, framework="OpenAI client, Responses", plugin=art_openai, packages=["openai"])
    )
