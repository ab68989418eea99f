"""An API's requests, answers and errors, translated to and from OpenAI's chat completions."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping

import orjson

from art_core.types import JsonDict

MODEL = re.escape("{model}")
_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Dialect:
    """Chat completions, which need no translation.

    Another API must override ``to_chat``, ``from_chat`` and ``stream_from_chat``, and may override the rest.
    """

    media_type = "text/event-stream; charset=utf-8"
    """The content type of streams."""
    counts_tokens = False
    """Whether the API only counts a prompt's tokens. Of its completions one token is sampled, and nothing is recorded."""

    def to_chat(self, body: JsonDict) -> JsonDict:
        """Return the chat request for ``body``, or one with ``prompt`` (text or token ids) instead of ``messages``."""
        return body

    def agent(self, headers: Mapping[str, str]) -> str | None:
        """Return who is calling, if a client of this API says so in its own headers (by lower-case name)."""
        return None

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict:
        """Return the answer to ``body``, made from a chat completion."""
        return completion

    async def stream_from_chat(self, body: JsonDict, chunks: AsyncIterable[JsonDict]) -> AsyncGenerator[str | bytes]:
        """Yield the answer to ``body`` as complete events, including their framing."""
        async for chunk in chunks:
            yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def error(self, message: str, status: int, code: str | None) -> JsonDict:
        """Return the body of an error answer."""
        kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}

    def error_event(self, message: str, status: int, code: str | None) -> str | bytes:
        """Return the last event of a stream that failed."""
        return b"data: " + orjson.dumps(self.error(message, status, code)) + b"\n\n"


CHAT_COMPLETIONS = Dialect()


class Paths:
    """The paths at a rollout's address. Clients may or may not have ``/v1`` in their base URL; some add it again.

    ``{model}`` stands for a model's name, which may have slashes, other names in braces for a segment. The first match counts.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._patterns: dict[str, re.Pattern[str]] = {}
        for path in paths:
            pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path).replace(MODEL, "([^/]+(?:/[^/]+){0,3})"))
            self._patterns[path] = re.compile(f"/rollouts/(.*?)(?:/v1(?:beta1?)?){{0,4}}{pattern}", re.DOTALL)

    def split(self, path: str) -> tuple[str, str, str | None] | None:
        """Return the rollout's id, the one of the paths that this is, and the model in it. None for other paths."""
        for known, pattern in self._patterns.items():
            if found := pattern.fullmatch(path):
                rollout_id, *model = found.groups()
                return rollout_id, known, *(model or [None])
        return None
