"""How large, how slow and how strange a request may be: over real sockets."""

import contextlib
import re

import aiohttp
import pytest
from fastapi.routing import APIRoute
from served import END, SHAKE, raw, served
from starlette.routing import Mount

from art_core.capture import listening
from art_server import guard
from art_server.messages import NAME
from art_server.requests import MAX_TASKS

# --- how much


def job(tasks, **more):
    return {"kind": "collect", "tasks": tasks, **more}


async def chunks(count, size=2**16):
    for _ in range(count):
        yield b"x" * size


async def test_a_body_above_the_limit_is_refused_with_and_without_its_length(tmp_path):
    async with served(tmp_path) as (_, host, http):
        for path, method in (("/api/jobs/a", "PUT"), ("/rollouts/a/v1/chat/completions", "POST")):
            head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {guard.MAX_BODY + 1}\r\n\r\n"
            assert (await raw(host, head.encode(), enough=END)).startswith(b"HTTP/1.1 413 "), path
            async with http.request(method, path, data=chunks(guard.MAX_BODY // 2**16 + 4)) as answer:
                assert answer.status == 413, path


async def test_of_a_body_above_the_limit_no_more_than_the_limit_is_read():
    read, refused = [], []

    async def app(scope, receive, send):
        while True:
            read.append(len((await receive())["body"]))

    async def endless():
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    async def send(message):
        refused.append(message)

    small = guard.Guard(app, token=None, max_body=1000)
    await small({"type": "http", "method": "PUT", "headers": [(b"host", b"localhost")]}, endless, send)
    assert sum(read) == 1000 and refused[0]["status"] == 413


async def test_a_body_that_does_not_come_is_not_waited_for(tmp_path):
    def app_with(seconds):
        async def app(scope, receive, send):
            while (await receive()).get("more_body"):
                pass

        return guard.Guard(app, token=None, body_seconds=seconds)

    async with served(tmp_path, app=app_with(0.2), lifespan="off") as (_, host, _http):
        head = f"PUT /a HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\n".encode()
        assert (await raw(host, head, *[b"x"] * 50, pause=0.02)).startswith(b"HTTP/1.1 408 ")


async def test_headers_of_any_size_are_not_taken(tmp_path):
    line = b"GET /status HTTP/1.1\r\nHost: x\r\n"
    many = [b"X-%d: %s\r\n" % (number, b"y" * 60_000) for number in range(40)]
    chunked = b"PUT /api/jobs/a HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with served(tmp_path) as (_, host, _http):
        for parts in (
            [line, b"X: ", *[b"y" * 2**16] * 64],
            [line, *many],
            [b"GET /", *[b"y" * 2**16] * 64],
            [chunked, b"1;", *[b"y" * 2**16] * 64],
            [chunked, b"1\r\nx\r\n0\r\n", b"X: ", *[b"y" * 2**16] * 64],
        ):
            answer = await raw(host, *parts)
            assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 ", b"HTTP/1.1 414 ")) or not answer, answer[:80]
        head = b"GET /status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: " + b"y" * 30_000 + b"\r\n\r\n"
        assert (await raw(host, head)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.system
async def test_headers_that_do_not_come_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(listening, "HEAD_SECONDS", 0.3)
    async with served(tmp_path) as (_, host, _http):
        for parts in ([], [b"GET /status HTTP/1.1\r\n", *[b"X: y\r\n"] * 40]):
            answer = await raw(host, *parts, pause=0.02)
            assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_message_above_the_limit_ends_the_socket_and_nothing_else(tmp_path):
    async with served(tmp_path, ws_max_size=10_000) as (_, _, http):
        for compressed, size in ((0, 10_001), (15, 10_000_000)):  # small on its way is no smaller here
            async with http.ws_connect("/ws/a", compress=compressed) as socket_:
                await socket_.send_str("x" * size)
                told = await socket_.receive(5)
                assert told.type is aiohttp.WSMsgType.CLOSE and told.data == 1009
        async with http.get("/status") as answer:
            assert (await answer.json())["active_clients"] == 0


# --- names


NAMES = [
    "..", ".", "%2e%2e", "%2E%2E", "..%2f..%2fetc%2fpasswd", "%2fetc%2fpasswd", "a%2f..", "..%5c..", "%00", "a%00b", "a%0ab",
    "C:%5Cx", "~", "%7e", "a;b", "x" * 65, "x" * 5000, "%c3%a9", "%ff", "%F0%9F%98%80", "%e2%80%ae", "%25%32%65", "a b",
    "{}", "%7B%7D", "'%20OR%201=1--", "%3Cscript%3E", "-1", "999999999999999999999999", "nan", ".hidden", "a%0d%0aX-Y:%20z",
]  # fmt: skip


@pytest.mark.system
async def test_no_name_leads_out_of_the_run_nor_to_a_failure(tmp_path):
    (tmp_path / "secret").write_text("TOP-SECRET")
    async with served(tmp_path) as (app, host, _http):
        for route in [it for it in _api_routes(app) if "{" in it.path]:
            for method in route.methods:
                for name in NAMES:
                    for path in _filled(route.path, name):
                        answer = await raw(
                            host,
                            f"{method} {path.replace(' ', '+')} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
                            "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}".encode(),
                        )
                        status = int(answer[9:12])
                        assert 400 <= status < 500, f"{method} {path:.80}: {status}"
                        assert b"TOP-SECRET" not in answer


def _api_routes(app):
    found = []

    def walk(routes):
        for route in routes:
            if isinstance(route, APIRoute):
                found.append(route)
            elif not isinstance(route, Mount) and not hasattr(route, "path"):
                walk(getattr(route, "routes", None) or route.original_router.routes)

    walk(app.routes)
    return found


def _filled(path, name):
    """Yield the path with one of its parameters so named, for each of them."""
    parts = re.split(r"{[^}]+}", path)
    for number in range(1, len(parts)):
        yield "1".join(parts[:number]) + name + "1".join(parts[number:])


async def test_a_rollouts_address_leads_to_rollouts_only(tmp_path):
    async with served(tmp_path) as (_, host, _http):
        for path in ("/rollouts/../status", "/rollouts/%2e%2e/%2e%2e/status", "/rollouts/..%2f..%2fstatus"):
            head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            assert (await raw(host, head.encode())).startswith(b"HTTP/1.1 404 ")


async def test_a_worker_is_not_let_in_under_a_name_that_is_none(tmp_path):
    async with served(tmp_path) as (_, host, _http):
        for name in NAMES:
            if re.fullmatch(NAME.removesuffix("$"), name):
                continue
            head = f"GET /ws/{name.replace(' ', '+')} HTTP/1.1\r\nHost: {host}\r\n{SHAKE}\r\n\r\n"
            answer = await raw(host, head.encode(), enough=END)
            assert answer.startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 404 ")), f"{name:.60}: {answer[:40]}"


# --- what JSON can be


BOMBS = [
    b"[" * 100_000,
    b'{"kind":"collect","tasks":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"kind":"collect","tasks":["a"],"step":' + b"9" * 5000 + b"}",
    b'{"kind":"collect","tasks":["a"],"group_size":1e400}',
    b'{"kind":"collect","tasks":["a"],"group_size":NaN}',
    b'{"kind":"collect","tasks":["a"],"sampling":{"temperature":Infinity}}',
    b'{"kind":"collect","tasks":[NaN]}',
    b'{"kind":"scores","by":"x","groups":[[{"rollout_id":"a","reward":NaN}]]}',
    b'{"kind":"collect","tasks":["a"],"pool":"\\ud800"}',
    b"\xff\xfe",
    b"",
    b"null",
    b'"\x00"',
    b'{"kind":"' + b"x" * 100_000 + b'"}',
    b'{"kind":"collect","tasks":["a"],"' + b"k" * 100_000 + b'":1}',
]


async def test_json_that_is_none_or_too_much_is_refused(tmp_path):
    async with served(tmp_path) as (_, _, http):
        for body in BOMBS:
            async with http.put("/api/jobs/a", data=body, headers={"content-type": "application/json"}) as answer:
                assert 400 <= answer.status < 500, f"{body[:60]}: {await answer.text()}"
                assert len(await answer.read()) < 20_000


async def test_a_message_that_is_none_is_told_so(tmp_path):
    async with served(tmp_path) as (_, _, http), http.ws_connect("/ws/a") as socket_:
        for body in BOMBS[:19]:
            with contextlib.suppress(UnicodeDecodeError):
                await socket_.send_str(body.decode())
                told = await socket_.receive_json(timeout=60)
                assert told["type"] == "error" and len(told["message"]) < 2000


async def test_more_tasks_than_a_collection_may_have_are_refused_in_short(tmp_path):
    async with served(tmp_path) as (_, _, http), http.put("/api/jobs/a", json=job([0] * (MAX_TASKS + 1))) as answer:
        assert answer.status == 422 and len(await answer.read()) < 20_000


# --- the pages of documentation


async def test_the_pages_of_documentation_load_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("fastapi_offline")
    async with served(tmp_path) as (_, _, http):
        async with http.get("/docs") as answer:
            page = await answer.text()
        loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
        assert answer.status == 200 and len(loaded) >= 2
        for address in loaded:
            assert address.startswith("/")
            async with http.get(address) as answer:
                assert answer.status == 200, address
