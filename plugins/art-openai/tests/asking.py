"""Asks the OpenAI client for everything, as a program of its own: without art, with it, or beside a rollout that runs."""

import asyncio
import sys
import threading

import openai

HELLO = [{"role": "user", "content": "hello"}]
SETTINGS = {"api_key": "agent", "default_headers": {"x-own": "1"}, "default_query": {"own": "2"}, "max_retries": 0}


def ask(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url, **SETTINGS) as client:
        chat = client.chat.completions
        print(chat.create(model="m", messages=HELLO, temperature=0).choices[0].message.content)
        print([chunk.choices[0].delta.content for chunk in chat.create(model="m", messages=HELLO, stream=True)])
        print(chat.with_raw_response.create(model="m", messages=HELLO).http_response.status_code)
        print(client.responses.create(model="m", input="hello").output_text)
        print(client.completions.create(model="m", prompt="hello").choices[0].text)
        print(client.embeddings.create(model="m", input="hello", encoding_format="float").data)


async def ask_async(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, **SETTINGS) as client:
        chat = client.chat.completions
        print((await chat.create(model="m", messages=HELLO)).choices[0].message.content)
        stream = await chat.create(model="m", messages=HELLO, stream=True)
        print([chunk.choices[0].delta.content async for chunk in stream])


def beside_a_rollout(base_url: str) -> None:
    from art_core.attribution import inside_rollout
    from art_core.types import RolloutAddress

    entered, left = threading.Event(), threading.Event()

    def rollout() -> None:
        with inside_rollout(RolloutAddress("r", "http://127.0.0.1:9/rollouts/r/v1", "key", "policy")):
            entered.set()
            left.wait()

    thread = threading.Thread(target=rollout)
    thread.start()
    entered.wait()
    ask(base_url)
    asyncio.run(ask_async(base_url))
    left.set()
    thread.join()


if __name__ == "__main__":
    how, url = sys.argv[1:]
    if how != "without":
        import art_openai

        art_openai.redirect_clients()
    if how == "beside":
        beside_a_rollout(url)
    else:
        ask(url)
        asyncio.run(ask_async(url))
    assert (how == "without") != ("art_core" in sys.modules)
