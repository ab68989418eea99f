"""A rollout's calls on their way to the server, over real sockets: what is passed on, and what is said where that breaks."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest
from served import serving

import art_server
from art_server.proxy import Proxy
from art_server.remote import ServerError


@asynccontextmanager
async def policy_server(answer):
    """Something behind the proxy that reads a head and says ``answer``; yield (client, list of the heads)."""
    heads = []

    async def serve(reader, writer):
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = Proxy(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server, serving(proxy, lifespan="off") as host, aiohttp.ClientSession(f"http://{host}") as http:
        yield http, heads
    await proxy.close()


async def test_an_engine_that_ends_before_it_answers_is_a_503_that_says_so():
    async with policy_server(b"") as (http, heads), http.post("/rollouts/a/v1/chat/completions", data=b"{}") as answer:
        assert (
            answer.status == 503
            and "can't reach the policy's capture server" in (await answer.json())["error"]["message"]
        )
        assert len(heads) == 1, "a call is not made twice"


async def test_an_answer_that_breaks_off_is_not_a_whole_one():
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"
    async with policy_server(half) as (http, _), http.get("/rollouts/a/v1/models") as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


async def test_what_is_passed_on_is_what_was_asked_and_nothing_more():
    ok = b"HTTP/1.1 307 Elsewhere\r\nLocation: /there\r\nX-A: 1\r\nX-A: 2\r\nContent-Length: 0\r\n\r\n"
    asked = {"skip_auto_headers": ("Accept", "Accept-Encoding", "User-Agent"), "headers": {"Authorization": "Bearer t"}}
    path = "/rollouts/a%2Fb/v1/models?x=%20"
    async with policy_server(ok) as (http, heads), http.get(path, allow_redirects=False, **asked) as answer:
        assert answer.status == 307 and answer.headers.getall("x-a") == ["1", "2"]
    [head] = heads
    first, *rest = head.decode().lower().split("\r\n")
    assert first == "get /rollouts/a%2fb/v1/models?x=%20 http/1.1"
    assert [it.partition(":")[0] for it in rest if it] == ["host"]


@pytest.mark.parametrize("status", ["400 Bad Request", "200 OK"])
async def test_a_token_that_something_before_the_server_says_back_is_not_shown(status):
    token = "a-token-that-nobody-is-shown"

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n{'.' * 190}".encode() + head)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ServerError) as refusal:
            async with art_server.connect(f"http://127.0.0.1:{port}", token=token, patience=5):
                pass
    assert not any(part in str(refusal.value) for part in (token, token[:8])) and "." * 190 in str(refusal.value)
