"""An API's requests, answers and errors, translated to and from OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable

import orjson

from art_core.types import JsonDict

_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Dialect:
    """Chat completions, which need no translation.

    Another API must override ``to_chat``, ``from_chat`` and ``stream_from_chat``, and may override the other methods.
    """

    def prepare(self) -> None:
        """Do slow imports and other preparation. Called once, in a thread, before the first call."""

    def to_chat(self, body: JsonDict) -> JsonDict:
        """Return the chat request for ``body``, or one with ``prompt`` (text or token ids) instead of ``messages``."""
        return body

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict:
        """Return the answer to ``body``, made from a chat completion."""
        return completion

    async def stream_from_chat(self, body: JsonDict, chunks: AsyncIterable[JsonDict]) -> AsyncGenerator[str | bytes]:
        """Yield the answer to ``body`` as complete server-sent events, including their framing."""
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


def as_dialect(methods: object) -> Dialect:
    """Return a Dialect with the methods of this object, and the defaults for those that it lacks."""
    if isinstance(methods, Dialect):
        return methods
    dialect = Dialect()
    for name in ("prepare", "to_chat", "from_chat", "stream_from_chat", "error", "error_event"):
        if method := getattr(methods, name, None):
            setattr(dialect, name, method)
    return dialect
