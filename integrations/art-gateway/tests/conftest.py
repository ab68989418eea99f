"""An upstream that can be told to fail, and a gateway in front of it, both on real sockets in the test's own loop."""

import asyncio
import contextlib
import json
from collections import deque

import aiohttp
import pytest

from art_core.capture import HttpUpstream, address_of, http_server, listen
from art_core.store import Store
from art_core.testing import FakeEngine
from art_core.testing.provider import PlainProvider, scripted_reply
from art_gateway import dialects
from art_gateway.app import Gateway, Limits
from art_gateway.routing import Pool


def prompt_ids(messages):
    return list(json.dumps(messages).encode())


class Upstream:
    """Says the last message back, one token per byte, in vLLM's way. ``faults`` are what befalls the next requests."""

    def __init__(self):
        self.faults = deque()
        self.delay = 0.0
        self.may_answer = asyncio.Event()
        """Cleared by tests that need requests in flight; then nothing is answered until it is set."""
        self.may_answer.set()
        self.requests = []
        self.paths = []
        self.open = 0
        """Requests that are being answered."""
        self.cut_off = 0
        """Answers whose reader went away."""
        self.writers = set()

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_):
        await self.stop()

    async def stop(self):
        self.server.close()
        for writer in list(self.writers):
            writer.transport.abort()
        await self.server.wait_closed()
        await asyncio.sleep(0)

    async def serve(self, reader, writer):
        self.writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
                body = await reader.readexactly(length)
                self.paths.append(head.split()[1])
                if head.startswith("get"):
                    self.send(writer, 200, json.dumps({"object": "list", "data": [{"id": "served"}]}))
                    continue
                self.open += 1
                try:
                    await self.answer(writer, json.loads(body))
                finally:
                    self.open -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.transport.abort()

    @staticmethod
    def send(writer, status, body, headers=""):
        content = body.encode()
        head = (
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n{headers}\r\n"
        )
        writer.write(head.encode() + content)

    async def answer(self, writer, request):
        self.requests.append(request)
        fault = self.faults.popleft() if self.faults else None
        if fault in (429, 500, 502, 503, 504):
            after = "retry-after: 0\r\n" if fault == 429 else ""
            return self.send(writer, fault, json.dumps({"error": {"message": f"fault {fault}"}}), after)
        if fault == "reset":
            writer.transport.abort()
            raise ConnectionError
        if fault == "hang":
            await asyncio.sleep(60)
        if fault == "not json":
            return self.send(writer, 200, "<html>")
        if fault == "no shape":
            return self.send(writer, 200, json.dumps({"prompt_token_ids": [1], "choices": ["text"]}))
        await self.may_answer.wait()
        if self.delay:
            await asyncio.sleep(self.delay)
        if request.get("stream"):
            await self.stream(writer, request, fault)
        else:
            self.complete(writer, request, fault)

    def complete(self, writer, request, fault):
        text = request["messages"][-1]["content"]
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        body = {"id": "1", "choices": [choice | self.tokens(text, fault)]}
        body |= {} if fault == "no ids" else {"prompt_token_ids": prompt_ids(request["messages"])}
        content = json.dumps(body)
        if fault == "half":
            writer.write(b"HTTP/1.1 200 X\r\ncontent-length: 9999\r\n\r\n" + content.encode())
            writer.close()
            raise ConnectionError
        self.send(writer, 200, content)

    @staticmethod
    def tokens(text, fault=None):
        content = [{"token": letter, "logprob": -ord(letter) / 64} for letter in text]
        return {"logprobs": {"content": content}} | ({} if fault == "no ids" else {"token_ids": list(text.encode())})

    async def stream(self, writer, request, fault):
        writer.write(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        text = request["messages"][-1]["content"]

        def event(choice, **more):
            data = b"data: " + json.dumps({"id": "1", "choices": [{"index": 0, **choice}], **more}).encode() + b"\n\n"
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))

        more = {} if fault == "no ids" else {"prompt_token_ids": prompt_ids(request["messages"])}
        try:
            for place, letter in enumerate(text):
                if fault == "half" and place == len(text) // 2:
                    await writer.drain()
                    # Long enough for what came before to be passed on.
                    await asyncio.sleep(0.05)
                    writer.transport.abort()
                    raise ConnectionError
                if fault == "not json" or (fault == "half json" and place == 1):
                    writer.write(b"6\r\ndata: \r\n5\r\n{oops\r\n2\r\n\n\n\r\n")
                event({"delta": {"content": letter}, "finish_reason": None, **self.tokens(letter, fault)}, **more)
                await writer.drain()
                if self.delay:
                    await asyncio.sleep(self.delay)
                if writer.transport.is_closing():
                    raise ConnectionError
                more = {}
        except ConnectionError:
            self.cut_off += fault != "half"
            raise
        event({"delta": {}, "finish_reason": "stop", "token_ids": [], "logprobs": None})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


class Desk:
    """A running gateway with its parts within reach, and a client."""

    def __init__(self, url, gateway, store, client):
        self.url, self.gateway, self.store, self.client = url, gateway, store, client

    def of(self, rollout_id):
        return self.store.calls(rollout_id)

    async def ask(self, rollout_id, text, *, headers=None, **settings):
        """Return (status, answer, headers)."""
        body = {"model": "policy", "messages": [{"role": "user", "content": text}], **settings}
        address = f"{self.url}/rollouts/{rollout_id}/v1/chat/completions"
        async with self.client.post(address, json=body, headers=headers) as response:
            content = await response.text()
            return response.status, content if settings.get("stream") else json.loads(content), response.headers

    async def order(self, method, path, body=None, headers=None):
        async with self.client.request(method, self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()


@contextlib.asynccontextmanager
async def gateway(folder, *urls, upstreams=None, kind=Gateway, retries=4, timeout=60.0, limits=None, **options):
    listener = listen("127.0.0.1", 0)
    with listener, Store(folder / "run.sqlite") as store:
        upstreams = upstreams or [HttpUpstream(url, timeout=timeout) for url in urls]
        pool = Pool.of(upstreams, retries, first_pause=0.01)
        app = kind(pool, store, limits=limits or Limits(), **options)
        for each in app.pools:
            await each.start()
        server = http_server(app)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            yield Desk(address_of("127.0.0.1", listener.getsockname()[1]), app, store, client)
        server.should_exit = True
        await serving
        await app.abort()
        for each in app.pools:
            await each.stop()
        await asyncio.sleep(0)  # connections close in the loop's next turn


@pytest.fixture
async def upstream():
    async with Upstream() as upstream:
        yield upstream


@pytest.fixture
def provider():
    with PlainProvider(FakeEngine(scripted_reply), dialects()).running() as running:
        yield running


@pytest.fixture
def start(tmp_path, upstream):
    """``async with start(**options) as desk``: a gateway before ``upstream``, or before ``urls``."""

    def start(*urls, **options):
        return gateway(tmp_path, *(urls or [upstream.url]), **options)

    return start


@pytest.fixture
def another_upstream():
    return Upstream


async def until(true, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)


@pytest.fixture(name="until")
def until_fixture():
    return until
