"""A door of this process with a FakeEngine behind it, and what the tests of every dialect ask of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from art_core.capture import Door
from art_core.testing import FakeEngine
from art_core.types import Call, Sampling
from art_gateway import dialects

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool_calls(*cities: str, content: str | None = None) -> dict:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": "weather", "arguments": f'{{"city": "{city}"}}'}}
        for i, city in enumerate(cities)
    ]
    return {"content": content, "tool_calls": calls}


class Calls:
    """A recorder that keeps calls in a list."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def record(self, rollout_id: str, call: Call) -> None:
        self.calls.append(call)

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Desk:
    def __init__(self, url: str, engine: FakeEngine, calls: list[Call]) -> None:
        self.url, self.engine, self.calls = url, engine, calls

    def complete(self, made: int) -> bool:
        """Whether as many calls are recorded as were made, each with ids, logprobs and its end."""
        assert len(self.calls) == made == len(self.engine.requests)
        for call in self.calls:
            assert call.prompt_ids and call.sampled_ids and len(call.logprobs) == len(call.sampled_ids)
            assert call.finish_reason != "aborted"
        return True


@asynccontextmanager
async def opened(engine: FakeEngine) -> AsyncIterator[Desk]:
    recorder = Calls()
    async with await Door.start(lambda: engine, lambda: recorder, process=False, dialects=dialects()) as door:
        yield Desk(await door.open("r", Sampling()), engine, recorder.calls)


@pytest.fixture
def desk():
    """``async with desk("answer", ...) as at:`` opens a rollout's address; the answers are taken in turn."""
    return lambda *replies, **options: opened(FakeEngine(list(replies), **options))
