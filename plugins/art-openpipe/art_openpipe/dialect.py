"""Chat completions in which every choice names its recorded call.

Scripts keep only the choices of an answer, and may use any client, so the server adds the mark.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import aclosing

from art_core.capture import ANSWER, Dialect
from art_core.types import JsonDict

PATH = "/v1/openpipe/chat/completions"
BASE = "/openpipe"
"""The suffix of a rollout's base URL for this path."""
MARK = "art_call"
"""The field of a choice with its request's id; together with the choice's index it identifies a call."""


class Named(Dialect):
    """Chat completions with the mark in every choice."""

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
