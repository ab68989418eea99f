"""Who is let in, from where, and how much at once: over real sockets, with real clients."""

import asyncio
import base64
import inspect
import os
import re
import signal
import subprocess
import sys

import aiohttp
import pytest
import typer
from served import END, SHAKE, raw, served
from starlette.routing import Mount, WebSocketRoute
from typer.testing import CliRunner

from art_core.errors import ConfigError
from art_server import connect, guard, register_commands
from art_server.serve import Plan

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
    "/rollouts/a/v1/chat/completions",
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


# --- the token


async def test_without_the_token_every_route_answers_401_by_every_method(tmp_path):
    wrong = [
        {},
        {"x-api-key": "nonsense"},
        {"Authorization": "Bearer nonsense"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        basic("nonsense"),
    ]
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


NO_TOKENS = [
    "", "Bearer", "Bearer ", "bearer  ", TOKEN, f"Token {TOKEN}", f"Digest {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN},",
    "Basic", "Basic !!!", "Basic é", "Basic " + base64.b64encode(TOKEN.encode()).decode(),
    "Basic " + base64.b64encode(b"\xff:\xfe").decode(), f"Basic {TOKEN}", "Bearer é", "Bearer " + "x" * 10_000,
]  # fmt: skip


async def test_what_is_no_token_is_answered_401_whatever_it_is(tmp_path):
    async with served(tmp_path, TOKEN) as (_, host, _http):
        for value in NO_TOKENS:
            head = f"GET /status HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nAuthorization: {value}\r\n\r\n"
            assert (await raw(host, head.encode())).startswith(b"HTTP/1.1 401 "), value


async def test_the_token_is_taken_as_bearer_and_as_the_password_of_a_browser(tmp_path):
    lower = {"authorization": f"bearer {TOKEN}"}
    async with served(tmp_path, TOKEN) as (_, _, http):
        anthropic = {"x-api-key": TOKEN}
        for headers in (GOOD, lower, anthropic, basic(TOKEN), basic(TOKEN, name=""), {"Host": "art.example", **GOOD}):
            async with http.get("/status", headers=headers) as answer:
                assert answer.status == 200, headers


def test_the_token_is_compared_in_constant_time():
    source = inspect.getsource(guard.Guard._is_token)
    assert "hmac.compare_digest" in source and "==" not in source


@pytest.mark.parametrize(
    ("host", "token", "reason"),
    [
        ("0.0.0.0", None, "so the server needs a token"),
        ("::", None, "so the server needs a token"),
        ("192.168.1.5", None, "so the server needs a token"),
        ("art.example", None, "so the server needs a token"),
        ("0.0.0.0", "short", "at least 16 ASCII characters"),
        ("127.0.0.1", "short", "at least 16 ASCII characters"),
        ("127.0.0.1", "ünïcödé-token-of-good-length", "at least 16 ASCII characters"),
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


OTHER_HOSTS = [
    "art.example", "127.0.0.1.nip.io", "localhost.evil.example", "0.0.0.0", "192.168.1.5", "", "[", "[::1", "[::1]x",
    "a@localhost", "\xe9",
]  # fmt: skip


async def test_without_a_token_other_names_of_this_machine_are_refused(tmp_path):
    refusals = (b"HTTP/1.1 421 ", b"HTTP/1.1 400 ")
    async with served(tmp_path) as (_, host, _http):
        for name in OTHER_HOSTS:
            for head in ("GET /status HTTP/1.1\r\nConnection: close", f"GET /ws/a HTTP/1.1\r\n{SHAKE}"):
                answer = await raw(host, f"{head}\r\nHost: {name}\r\n\r\n".encode("latin-1"), enough=END)
                assert answer.startswith(refusals), f"{name}: {answer[:60]}"


async def test_this_machines_own_names_are_answered(tmp_path):
    async with served(tmp_path) as (_, _, http):
        for name in ("localhost", "localhost:8000", "127.0.0.1", "127.0.0.9:1", "[::1]:8000"):
            async with http.get("/status", headers={"Host": name}) as answer:
                assert answer.status == 200, name


@pytest.mark.parametrize("token", [None, TOKEN])
async def test_pages_of_other_origins_change_nothing_and_open_no_socket(tmp_path, token):
    async with served(tmp_path, token) as (_, _, http):
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://[", "file://"):
            headers = {"Origin": origin, **(GOOD if token else {})}
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


def test_an_open_address_without_a_token_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ART_SERVER_TOKEN", raising=False)
    app = typer.Typer()
    register_commands(app)
    for options, reason in (([], "ART_SERVER_TOKEN"), (["--token", "short"], "openssl rand -hex 32")):
        ended = CliRunner().invoke(app, ["serve", "--host", "0.0.0.0", "--run-dir", "run", *options])
        assert ended.exit_code != 0 and reason in f"{ended.exception}" and not (tmp_path / "run").exists()


@pytest.mark.engines
@pytest.mark.skipif(sys.platform == "win32", reason="there is no ps")
async def test_a_token_of_the_environment_is_in_no_process_list_and_nothing_written(tmp_path):
    command = [sys.executable, "-m", "art_cli", "serve", "--port", "0", "--run-dir", "run"]
    environment = {**os.environ, "ART_SERVER_TOKEN": TOKEN, "ART_LOG": "DEBUG"}
    with (tmp_path / "said").open("wb") as said:
        server = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=said, stderr=said)
    try:
        for _ in range(600):
            found = re.search(r"serving at (\S+)", (tmp_path / "said").read_text())
            if found or server.poll() is not None:
                break
            await asyncio.sleep(0.1)
        async with connect(found[1], token=TOKEN) as run:
            processes = subprocess.run(["ps", "-A", "-o", "args"], capture_output=True, text=True, check=True).stdout
            async with connect(found[1], token=TOKEN[:-1] + "x") as _:
                raise AssertionError("the wrong token was taken")
    except ConfigError as error:
        assert "refused the token" in str(error) and TOKEN not in str(error)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
    assert "art_cli serve" in processes and TOKEN not in processes and run.url == found[1]
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 2 and not any(TOKEN.encode() in content for content in written)
