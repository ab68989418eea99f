"""Agents that are functions with the OpenAI client: each way of calling."""

import json

import openai

from framework_table import City, user

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def blocking(base_url):
    client = openai.OpenAI(api_key="k", base_url=base_url)
    return lambda text: client.chat.completions.create(model="m", messages=user(text)).choices[0].message.content


def asynchronous(base_url):
    client = openai.AsyncOpenAI(api_key="k", base_url=base_url)

    async def agent(text):
        answer = await client.chat.completions.create(model="m", messages=user(text))
        return answer.choices[0].message.content

    return agent


def streaming(base_url):
    client = openai.AsyncOpenAI(api_key="k", base_url=base_url)

    async def agent(text):
        stream = await client.chat.completions.create(model="m", messages=user(text), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    return agent


def with_tools(base_url):
    client = openai.AsyncOpenAI(api_key="k", base_url=base_url)

    async def agent(text):
        messages = user(text)
        while True:
            answer = await client.chat.completions.create(model="m", messages=messages, tools=[TOOL])
            message = answer.choices[0].message
            if not message.tool_calls:
                return message.content
            messages.append(message)
            for call in message.tool_calls:
                city = json.loads(call.function.arguments)["city"]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"rain in {city}"})

    return agent


def structured(base_url):
    client = openai.AsyncOpenAI(api_key="k", base_url=base_url)

    async def agent(text):
        answer = await client.chat.completions.parse(model="m", messages=user(text), response_format=City)
        return answer.choices[0].message.parsed

    return agent
