"""Chat completions whose every choice says which recorded call it is. Knows nothing about trajectories.

A script keeps only the choices of an answer, and any client may have asked: so the mark is put on by the server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable

import orjson

from art_core.capture import ANSWER
from art_core.types import JsonDict

PATH = "/v1/openpipe/chat/completions"
BASE = "/openpipe"
"""What follows a rollout's base URL there."""
MARK = "art_call"
"""The choice's field with the id of its request; with the choice's index that is one call."""


class Named:
    """The dialect: chat completions as they are, and the mark."""

    def to_chat(self, body: JsonDict) -> JsonDict:
        return body

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict:
        return _marked(completion)

    async def stream_from_chat(self, body: JsonDict, chunks: AsyncIterable[JsonDict]) -> AsyncGenerator[bytes]:
        async for chunk in chunks:
            yield b"data: " + orjson.dumps(_marked(chunk)) + b"\n\n"
        yield b"data: [DONE]\n\n"


def _marked(answer: JsonDict) -> JsonDict:
    request = answer["id"].removeprefix(ANSWER)
    return {**answer, "choices": [{**choice, MARK: request} for choice in answer["choices"]]}
