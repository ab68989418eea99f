"""Limits on the size and time of what comes before a request's body, byte by byte and without a clock."""

import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from art_core.capture import LimitedHeadProtocol
from art_core.capture.listening import HEAD_SECONDS, MAX_HEAD

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
LATE = b"the headers of a request must arrive within 20 seconds"
LARGE = b"the limit is 65536 bytes of headers"


class Timers:
    """The running loop, whose timers come when the test says."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.set: list[tuple[float, asyncio.TimerHandle]] = []

    def call_later(self, seconds, callback, *args):
        handle = asyncio.TimerHandle(0, callback, args, self._loop)
        self.set.append((seconds, handle))
        return handle

    def __getattr__(self, name):
        return getattr(self._loop, name)

    def waits_for_head(self) -> bool:
        return any(seconds == HEAD_SECONDS and not handle.cancelled() for seconds, handle in self.set)

    def ring(self) -> None:
        for _, handle in self.set:
            if not handle.cancelled():
                handle._run()


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sent, self.closed, self.protocol = b"", False, None

    def write(self, data):
        self.sent += data

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def get_protocol(self):
        return self.protocol

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


class Connection:
    def __init__(self) -> None:
        async def app(scope, receive, send):
            size, more = 0, True
            while more:
                message = await receive()
                size, more = size + len(message.get("body", b"")), message.get("more_body")
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
            await send({"type": "http.response.body", "body": b"%06d" % size})

        config = uvicorn.Config(app, http=LimitedHeadProtocol, lifespan="off", log_config=None, access_log=False)
        config.load()
        self.timers, self.wire = Timers(), Wire()
        self.protocol = LimitedHeadProtocol(config=config, server_state=ServerState(), app_state={}, _loop=self.timers)
        self.wire.protocol = self.protocol
        self.protocol.connection_made(self.wire)

    async def send(self, *pieces: bytes) -> bytes:
        """Send, and return what came back."""
        for piece in pieces:
            self.protocol.data_received(piece)
        for _ in range(20):
            await asyncio.sleep(0)
        sent, self.wire.sent = self.wire.sent, b""
        return sent


def refusal(status: bytes, why: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (status, len(why)) + why


async def test_headers_must_arrive_in_time_after_the_connection():
    connection = Connection()
    assert connection.timers.waits_for_head()
    assert await connection.send(HEAD) == b""
    connection.timers.ring()
    assert await connection.send() == refusal(b"408 Request Timeout", LATE)
    assert connection.wire.closed


async def test_a_body_may_take_long_but_the_next_head_may_not():
    connection = Connection()
    await connection.send(HEAD + b"content-length: 4\r\n\r\n")
    assert not connection.timers.waits_for_head()
    assert (await connection.send(b"ab", b"cd")).endswith(b"000004")
    assert not connection.timers.waits_for_head(), "an idle connection sends no head"
    await connection.send(b"P")
    assert connection.timers.waits_for_head()
    assert (await connection.send(HEAD[1:] + b"content-length: 0\r\n\r\n")).endswith(b"000000")
    assert not connection.timers.waits_for_head()


async def test_a_lost_connection_stops_the_timer():
    connection = Connection()
    connection.protocol.connection_lost(None)
    assert not connection.timers.waits_for_head()


@pytest.mark.parametrize("more", [0, 1])
async def test_the_size_of_a_head_is_limited(more):
    connection = Connection()
    # What comes in one piece with the beginning is not counted.
    said = await connection.send(HEAD + b"a: ", *[b"x" * 1000] * 65, b"x" * (MAX_HEAD - 65_000 + more))
    assert said == (refusal(b"431 Request Header Fields Too Large", LARGE) if more else b"")
    assert connection.wire.closed == bool(more)
    if more:
        connection.protocol.data_received(b"x")
        assert await connection.send() == b"", "it is refused once"


async def test_bytes_of_bodies_and_earlier_requests_do_not_count_as_head():
    connection = Connection()
    body = b"content-length: 100000\r\n\r\n"
    for _ in range(3):
        assert (await connection.send(HEAD + body, *[b"x" * 10_000] * 10)).endswith(b"100000")
    for _ in range(3):
        head = HEAD + b"a: " + b"x" * 40_000 + b"\r\ncontent-length: 0\r\n\r\n"
        assert (await connection.send(head)).endswith(b"000000")
    assert not connection.wire.closed


async def test_the_bytes_around_a_bodys_chunks_are_limited_too():
    connection = Connection()
    await connection.send(HEAD + b"transfer-encoding: chunked\r\n\r\n1;")
    said = await connection.send(*[b"x" * 10_000] * 7)
    assert said.startswith(b"HTTP/1.1 431 ") and connection.wire.closed
