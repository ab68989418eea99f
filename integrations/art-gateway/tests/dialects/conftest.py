"""A rollout's address with a FakeEngine behind it, and what the tests of every dialect ask of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anthropic
import openai
import pytest
from capture_fakes import committed

from art_core.serving import ServingProxy
from art_core.testing import FakeEngine
from art_core.types import Call
from art_gateway import dialects


class Calls(list):
    """A recorder that keeps calls."""

    def record(self, rollout_id: str, call: Call) -> None:
        self.append(call)

    def saved(self) -> Future[None]:
        return committed()

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Desk:
    """The address, the engine and the calls; clients are closed with it."""

    def __init__(self, url: str, engine: FakeEngine, calls: Calls) -> None:
        self.url, self.engine, self.calls = url, engine, calls
        self.openai = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)

    def all_recorded(self, made: int) -> bool:
        """Whether as many calls are recorded as were made, each with its ids, its logprobs and its end."""
        assert len(self.calls) == made == len(self.engine.requests)
        for call in self.calls:
            assert call.prompt_ids and call.sampled_ids and len(call.logprobs) == len(call.sampled_ids)
            assert call.finish_reason != "aborted"
        return True

    async def same_as_chat(self, **request) -> bool:
        """Whether chat, asked for the same, is shown the same prompt and answers with the same tokens as the last call."""
        translated = self.calls[-1]
        await self.openai.chat.completions.create(model="m", **request)
        assert self.calls[-1].prompt_ids == translated.prompt_ids
        assert self.calls[-1].sampled_ids == translated.sampled_ids
        assert self.calls[-1].response == translated.response
        return True


Opened = Callable[..., AbstractAsyncContextManager[Desk]]


@asynccontextmanager
async def _opened(*replies, **engine_options) -> AsyncIterator[Desk]:
    reply = replies[0] if len(replies) == 1 else list(replies)
    engine, calls = FakeEngine(reply, **engine_options), Calls()
    async with await ServingProxy.start(lambda: engine, lambda: calls, process=False, dialects=dialects()) as serving:
        desk = Desk(await serving.open("r"), engine, calls)
        async with desk.openai, desk.anthropic:
            yield desk


@pytest.fixture
def opened() -> Iterator[Opened]:
    """``async with opened("yes", "no") as desk``: an address whose engine answers in turn, over and over."""
    return _opened


@pytest.fixture
def two_calls() -> dict:
    """An assistant message that says something and calls a tool twice."""
    return message_of("Let me look.", "Paris", "Rome")


def message_of(content: str | None, *cities: str) -> dict:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'}}
        for i, city in enumerate(cities)
    ]
    return {"content": content, "tool_calls": calls}


@pytest.fixture
def city_schema() -> dict:
    """The parameters of the weather tool."""
    city = {"city": {"type": "string"}}
    return {"type": "object", "properties": city, "required": ["city"], "additionalProperties": False}


@pytest.fixture
def chat_tool(city_schema) -> dict:
    return {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": city_schema}}
