"""How an API looks to its clients: requests, answers and errors, translated to and from OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable

import orjson

from art_core.types import JsonDict

_ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Dialect:
    """Chat completions, which need no translation; another API overrides what differs.

    It has to override ``to_chat``, ``from_chat`` and ``stream_from_chat``; the other methods are optional.
    """

    def prepare(self) -> None:
        """Load what is slow to load. Called once, in a thread, before the first call."""

    def to_chat(self, body: JsonDict) -> JsonDict:
        """Return the chat request, or one with ``prompt`` (text or token ids) in place of ``messages``."""
        return body

    def from_chat(self, body: JsonDict, completion: JsonDict) -> JsonDict:
        """Return the answer to ``body``."""
        return completion

    async def stream_from_chat(self, body: JsonDict, chunks: AsyncIterable[JsonDict]) -> AsyncGenerator[str | bytes]:
        """Yield the answer to ``body`` as whole server-sent events, framing included."""
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
    """Return ``methods``, an object with some of a Dialect's methods, with the base class's in place of those it lacks."""
    if isinstance(methods, Dialect):
        return methods
    dialect = Dialect()
    for name in ("prepare", "to_chat", "from_chat", "stream_from_chat", "error", "error_event"):
        if method := getattr(methods, name, None):
            setattr(dialect, name, method)
    return dialect
