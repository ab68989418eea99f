"""Capture without a network: hands requests to ``CaptureApp`` and returns what a client reads."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from art_core.capture import CaptureApp
from art_core.types import Call, JsonDict, Sampling

T = TypeVar("T")
SECONDS = 10.0
"""For one request; nothing here waits for anything."""
_loop = asyncio.new_event_loop()
logging.getLogger("art_core").setLevel(
    logging.CRITICAL + 1
)  # what is refused is looked at here, thousands of times a second


def run(what: Awaitable[T]) -> T:
    """Return what it returns."""
    return _loop.run_until_complete(asyncio.wait_for(what, SECONDS))


class ListRecorder:
    """Keeps the calls of one request."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def record(self, rollout_id: str, call: Call) -> None:
        self.calls.append(call)

    def saved(self) -> Future[None]:
        """Nothing waits."""
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Reply:
    """What the client got, and what was recorded of it."""

    status: int
    stream: bool
    body: bytes
    calls: tuple[Call, ...]
    framed: bool = False
    """Whether the stream has Amazon's framing."""

    def events(self) -> list[Any]:
        """Return the data of a stream's events as JSON, the end mark left out."""
        if self.framed:
            return list(_framed(self.body))
        if b"\n\n" not in self.body:
            assert self.body.endswith(b"\n")
            return [json.loads(line) for line in self.body.splitlines()]
        assert self.body.endswith(b"\n\n")
        found = []
        for event in self.body[:-2].decode().split("\n\n"):
            [data] = [line[6:] for line in event.split("\n") if line.startswith("data: ")]
            if data != "[DONE]":
                found.append(json.loads(data))
        return found


async def ask(
    upstream: Any, path: str, body: bytes, *, dialects: Any = None, sampling: Sampling | None = None
) -> Reply:
    """Send a body to ``path`` of a rollout that ``upstream`` answers."""
    recorder = ListRecorder()
    app = CaptureApp(upstream, recorder, dialects=dialects)
    app.open("r", sampling or Sampling(temperature=1.0))
    told: list[JsonDict] = []
    asked: AsyncIterator[JsonDict] = _messages(body)
    scope = {"type": "http", "method": "POST", "path": f"/rollouts/r{path}", "headers": []}

    async def send(message: Any) -> None:
        told.append(message)

    await app(scope, lambda: anext(asked), send)
    start, *parts = told
    assert start["type"] == "http.response.start" and not parts[-1].get("more_body")
    head = dict(start["headers"])
    content = b"".join(part["body"] for part in parts)
    framed = head[b"content-type"] == b"application/vnd.amazon.eventstream"
    stream = framed or head[b"content-type"].startswith((b"text/event", b"application/x-ndjson"))
    return Reply(start["status"], stream, content, tuple(recorder.calls), framed)


def _framed(body: bytes) -> Iterator[Any]:
    """Yield the data of Amazon's messages, whose lengths and sums must be right."""
    while body:
        length, of_headers, checksum = struct.unpack(">III", body[:12])
        message, body = body[:length], body[length:]
        assert checksum == zlib.crc32(message[:8]) and len(message) == length
        assert struct.unpack(">I", message[-4:])[0] == zlib.crc32(message[:-4])
        told = json.loads(message[12 + of_headers : -4])
        yield json.loads(base64.b64decode(told["bytes"])) if "bytes" in told else told


async def _messages(body: bytes) -> AsyncIterator[JsonDict]:
    yield {"type": "http.request", "body": body}
    await asyncio.Event().wait()  # the client stays


def check_error(told: Any) -> None:
    """Hold an error to OpenAI's shape."""
    error = told["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    assert isinstance(error["code"], str | None) and error["param"] is None
