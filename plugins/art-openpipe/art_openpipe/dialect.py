"""Chat completions whose every choice says which recorded call it is. Knows nothing about trajectories.

A script keeps only the choices of an answer, and any client may have asked: so the mark is put on by the server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing

from art_core.capture import ANSWER, Dialect
from art_core.types import JsonDict

PATH = "/v1/openpipe/chat/completions"
BASE = "/openpipe"
"""What follows a rollout's base URL there."""
MARK = "art_call"
"""The choice's field with the id of its request; with the choice's index that is one call."""


class Named(Dialect):
    """Chat completions with the mark."""

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict:
        return _marked(completion)

    async def stream_from_chat(self, body: JsonDict, chunks: AsyncIterable[JsonDict]) -> AsyncGenerator[str | bytes]:
        marked = (_marked(chunk) async for chunk in chunks)
        async with aclosing(super().stream_from_chat(body, marked)) as events:
            async for event in events:
                yield event


def _marked(answer: JsonDict) -> JsonDict:
    request = answer["id"].removeprefix(ANSWER)
    return {**answer, "choices": [{**choice, MARK: request} for choice in answer["choices"]]}
