"""What is asked while no rollout runs, and from the main thread beside running ones, is the same on the wire, byte for byte."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).with_name("client_calls.py")
IDS = re.compile(rb"[0-9a-f]{8}-?([0-9a-f]{4}-?){3}[0-9a-f]{12}")


class Wire:
    """Passes bytes on to the stub, one request a connection, and keeps what it was sent."""

    def __init__(self, stub_url: str) -> None:
        self._port = int(stub_url.rpartition(":")[2])
        self.requests: list[bytes] = []

    async def passed_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        request = head + await reader.readexactly(int(length[1]) if length else 0)
        self.requests.append(IDS.sub(b"ID", request))
        from_stub, to_stub = await asyncio.open_connection("127.0.0.1", self._port)
        to_stub.write(re.sub(rb"(?i)connection: keep-alive", b"Connection: close", request))
        writer.write(await from_stub.read())
        for end in (to_stub, writer):
            end.close()
            await end.wait_closed()


async def sent(stub_url: str, how: str) -> tuple[list[bytes], str]:
    """Return the requests of a program that asks, and what it printed."""
    wire = Wire(stub_url)
    server = await asyncio.start_server(wire.passed_on, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        command = [sys.executable, SCRIPT, how, f"http://127.0.0.1:{port}/v1"]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        printed, _ = await process.communicate()
    assert process.returncode == 0
    return [request.replace(str(port).encode(), b"PORT") for request in wire.requests], printed.decode()


async def test_requests_that_belong_to_no_rollout_are_the_same_byte_for_byte(stub):
    without, *others = await asyncio.gather(*(sent(stub.url, how) for how in ("without", "with", "beside")))
    requests, printed = without
    assert len(requests) == 8
    assert requests[0].startswith(b"POST /v1/chat/completions?own=2 HTTP/1.1\r\n")
    assert printed.count("answer of outside") == 4
    assert others == [without, without]
