"""Who is let in, from where, and how much at once: over real sockets, with real clients."""

import asyncio
import base64
import contextlib
import inspect
import re

import aiohttp
import pytest
from fastapi.routing import APIRoute
from served import application, serving
from starlette.routing import Mount, WebSocketRoute

from art_core.errors import ConfigError
from art_server import edge, guard
from art_server.messages import NAME
from art_server.requests import MOST_TASKS
from art_server.serve import Plan

END = b"\r\n\r\n"
"""Of an answer's headers."""
TOKEN = "correct-horse-battery-staple-0123456789"
GOOD = {"Authorization": f"Bearer {TOKEN}"}
EVERY_METHOD = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
FURTHER = (
    "/",
    "/docs",
    "/docs/oauth2-redirect",
    "/redoc",
    "/openapi.json",
    "/static/app.js",
    "/favicon.ico",
    "/no/such",
)


def basic(password, name="someone"):
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


def paths_of(app):
    """The path of every route with its parameters filled in, mounted applications' too; sockets apart."""
    pages, sockets = set(FURTHER), set()

    def walk(routes, prefix):
        for route in routes:
            if isinstance(route, Mount):
                pages.add(f"{prefix}{route.path}/a/v1/chat/completions")
                walk(route.routes or (), prefix + route.path)
            elif hasattr(route, "path"):
                path = prefix + re.sub(r"{\w+(:\w+)?}", "1", route.path)
                (sockets if isinstance(route, WebSocketRoute) else pages).add(path)
            else:  # an included router that was not flattened
                walk(getattr(route, "routes", None) or route.original_router.routes, prefix)

    walk(app.routes, "")
    return sorted(pages), sorted(sockets)


@contextlib.asynccontextmanager
async def served(tmp_path, token=None, app=None, **settings):
    app = app or application(tmp_path / "run", token=token)
    async with serving(app, **settings) as host, aiohttp.ClientSession(f"http://{host}") as http:
        yield app, host, http


async def raw(host, *parts, pause=0.0, wait=5.0, enough=None):
    """Send bytes as they are and return what comes back until the connection ends or ``enough`` was said, at most so long."""
    reader, writer = await asyncio.open_connection(*host.split(":"))
    answer = b""

    async def send():
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(pause)

    sending = asyncio.create_task(send())
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(wait):
            while got := await reader.read(65536):
                answer += got
                if enough and enough in answer:
                    break
    sending.cancel()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return answer


# --- the token


async def test_without_the_token_every_route_answers_401_by_every_method(tmp_path):
    wrong = [{}, {"Authorization": "Bearer nonsense"}, {"Authorization": f"Bearer {TOKEN[:-1]}"}, basic("nonsense")]
    async with served(tmp_path, TOKEN) as (app, _, http):
        pages, sockets = paths_of(app)
        assert "/api/jobs/1" in pages and "/rollouts/a/v1/chat/completions" in pages and "/ws/1" in sockets
        for path in pages:
            for method in EVERY_METHOD:
                async with http.request(method, path, headers=wrong[0]) as answer:
                    assert answer.status == 401, f"{method} {path}"
            for headers in wrong[1:]:
                async with http.get(path, headers=headers) as answer:
                    assert answer.status == 401 and "Basic" in answer.headers["www-authenticate"], path


async def test_without_the_token_no_websocket_is_opened(tmp_path):
    async with served(tmp_path, TOKEN) as (app, _, http):
        for path in paths_of(app)[1]:
            for headers in ({}, {"Authorization": "Bearer nonsense"}, basic("nonsense")):
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await http.ws_connect(path, headers=headers)
                assert refused.value.status == 401, path
            async with http.ws_connect(path, headers=GOOD) as socket_:
                assert not socket_.closed


@pytest.mark.parametrize(
    "value",
    [
        "", "Bearer", "Bearer ", "bearer  ", TOKEN, f"Token {TOKEN}", f"Digest {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN},",
        "Basic", "Basic !!!", "Basic é", "Basic " + base64.b64encode(TOKEN.encode()).decode(),
        "Basic " + base64.b64encode(b"\xff:\xfe").decode(), f"Basic {TOKEN}", "Bearer é", "Bearer " + "x" * 10_000,
    ],
)  # fmt: skip
async def test_what_is_no_token_is_answered_401_whatever_it_is(tmp_path, value):
    async with served(tmp_path, TOKEN) as (_, host, _http):
        head = f"GET /status HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nAuthorization: {value}\r\n\r\n"
        assert (await raw(host, head.encode())).startswith(b"HTTP/1.1 401 ")


async def test_the_token_is_taken_as_bearer_and_as_the_password_of_a_browser(tmp_path):
    lower = {"authorization": f"bearer {TOKEN}"}
    async with served(tmp_path, TOKEN) as (_, _, http):
        for headers in (GOOD, lower, basic(TOKEN), basic(TOKEN, name=""), {"Host": "art.example", **GOOD}):
            async with http.get("/status", headers=headers) as answer:
                assert answer.status == 200, headers


def test_the_token_is_compared_in_constant_time():
    source = inspect.getsource(guard.Guard._knows_token)
    assert "hmac.compare_digest" in source and "==" not in source.replace('scheme.lower() == "basic"', "")


@pytest.mark.parametrize(
    ("host", "token", "reason"),
    [
        ("0.0.0.0", None, "must know a token"),
        ("::", None, "must know a token"),
        ("192.168.1.5", None, "must know a token"),
        ("art.example", None, "must know a token"),
        ("0.0.0.0", "short", "16 characters"),
        ("127.0.0.1", "short", "16 characters"),
        ("127.0.0.1", "ünïcödé-token-of-good-length", "16 characters"),
    ],
)
def test_an_address_of_other_machines_needs_a_token_that_cannot_be_guessed(tmp_path, host, token, reason):
    with pytest.raises(ConfigError, match=reason):
        Plan(tmp_path, host=host, token=token).check()


@pytest.mark.parametrize(
    ("host", "token"), [("127.0.0.1", None), ("::1", None), ("localhost", None), ("0.0.0.0", TOKEN)]
)
def test_this_machine_needs_no_token(tmp_path, host, token):
    Plan(tmp_path, host=host, token=token).check()


# --- pages of other sites


@pytest.mark.parametrize(
    "name",
    [
        "art.example", "127.0.0.1.nip.io", "localhost.evil.example", "0.0.0.0", "192.168.1.5", "", "[", "[::1", "[::1]x",
        "a@localhost", "\xe9",
    ],
)  # fmt: skip
async def test_without_a_token_other_names_of_this_machine_are_refused(tmp_path, name):
    async with served(tmp_path) as (_, host, _http):
        head = f"GET /status HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode("latin-1")
        answer = await raw(host, head)
        assert answer.startswith((b"HTTP/1.1 421 ", b"HTTP/1.1 400 ")), answer[:60]
        shake = "Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13"
        head = f"GET /ws/a HTTP/1.1\r\nHost: {name}\r\nConnection: Upgrade\r\n{shake}\r\n\r\n".encode("latin-1")
        assert (await raw(host, head, enough=END)).startswith((b"HTTP/1.1 421 ", b"HTTP/1.1 400 "))


async def test_this_machines_own_names_are_answered(tmp_path):
    async with served(tmp_path) as (_, _, http):
        for name in ("localhost", "localhost:8000", "127.0.0.1", "127.0.0.9:1", "[::1]:8000"):
            async with http.get("/status", headers={"Host": name}) as answer:
                assert answer.status == 200, name


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://[", "file://"])
async def test_pages_of_other_origins_change_nothing_and_open_no_socket(tmp_path, token, origin):
    headers = {"Origin": origin, **(GOOD if token else {})}
    async with served(tmp_path, token) as (_, _, http):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            async with http.request(method, "/api/jobs/a", headers=headers, data=b"{}") as answer:
                assert answer.status == 403, method
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect("/ws/a", headers=headers)
        assert refused.value.status == 403
        async with http.get("/status", headers=headers) as answer:
            assert answer.status == 200 and "access-control-allow-origin" not in answer.headers


async def test_the_servers_own_pages_may(tmp_path):
    async with served(tmp_path) as (_, host, http):
        headers = {"Origin": f"http://{host}"}
        async with http.post("/api/workers/a/shutdown", headers=headers) as answer:
            assert answer.status == 404
        async with http.ws_connect("/ws/a", headers=headers) as socket_:
            assert not socket_.closed


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


async def test_headers_that_do_not_come_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(edge, "HEAD_SECONDS", 0.3)
    async with served(tmp_path) as (_, host, _http):
        for parts in ([], [b"GET /status HTTP/1.1\r\n", *[b"X: y\r\n"] * 40]):
            answer = await raw(host, *parts, pause=0.02)
            assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_message_above_the_limit_ends_the_socket_and_nothing_else(tmp_path):
    async with served(tmp_path, ws_max_size=10_000) as (_, _, http):
        async with http.ws_connect("/ws/a") as socket_:
            await socket_.send_str("x" * 10_001)
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


@pytest.mark.parametrize(
    "path", ["/rollouts/../status", "/rollouts/%2e%2e/%2e%2e/status", "/rollouts/..%2f..%2fstatus"]
)
async def test_a_rollouts_address_leads_to_rollouts_only(tmp_path, path):
    async with served(tmp_path) as (_, host, _http):
        head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        assert (await raw(host, head.encode())).startswith(b"HTTP/1.1 404 ")


async def test_a_worker_is_not_let_in_under_a_name_that_is_none(tmp_path):
    async with served(tmp_path) as (_, host, _http):
        for name in NAMES:
            if re.fullmatch(NAME.removesuffix("$"), name):
                continue
            shake = "Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13"
            path = name.replace(" ", "+")
            head = f"GET /ws/{path} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\n{shake}\r\n\r\n"
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


@pytest.mark.parametrize("body", BOMBS, ids=lambda body: repr(body[:40]))
async def test_json_that_is_none_or_too_much_is_refused(tmp_path, body):
    async with served(tmp_path) as (_, _, http):
        async with http.put("/api/jobs/a", data=body, headers={"content-type": "application/json"}) as answer:
            assert 400 <= answer.status < 500, await answer.text()
            assert len(await answer.read()) < 20_000
        async with http.ws_connect("/ws/a") as socket_:
            with contextlib.suppress(UnicodeDecodeError):
                await socket_.send_str(body.decode())
                told = await socket_.receive_json(timeout=5)
                assert told["type"] == "error" and len(told["message"]) < 2000


async def test_more_tasks_than_a_collection_may_have_are_refused_in_short(tmp_path):
    async with served(tmp_path) as (_, _, http), http.put("/api/jobs/a", json=job([0] * (MOST_TASKS + 1))) as answer:
        assert answer.status == 422 and len(await answer.read()) < 20_000


# --- what is written


async def test_the_token_stands_in_no_file_log_or_answer(tmp_path, caplog, capfd):
    caplog.set_level("DEBUG")
    async with served(tmp_path, TOKEN) as (app, _host, http):
        told = []
        async with http.ws_connect("/ws/a", headers=GOOD) as socket_:
            await socket_.send_str("nonsense")
            told.append(await socket_.receive_str())
        for path in paths_of(app)[0]:
            for method in EVERY_METHOD:
                async with http.request(method, path, headers=GOOD, data=b"{}") as answer:
                    told += [await answer.text(errors="replace"), str(answer.headers)]
        body = {"messages": [{"role": "user", "content": "hi"}]}
        served_ = app.state.served
        async with served_.run.rollout("a task") as rollout:
            address = f"/rollouts/{rollout.rollout_id}/v1/chat/completions"
            async with http.post(address, headers=GOOD, json=body) as answer:
                told.append(await answer.text())
                assert answer.status == 200
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not any(TOKEN.encode() in content for content in files)
    assert TOKEN not in "".join(told) + caplog.text + "".join(capfd.readouterr())
