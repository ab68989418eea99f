"""Agents with plain HTTP clients keep every rule of an adapter, and what is not a rollout's is left alone."""

import asyncio
import dataclasses
import http.client
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import aiohttp
import httpx
import httpx2
import pytest
import requests
import urllib3
from google import genai
from http_server import serving
from starlette.responses import JSONResponse
from starlette.routing import Route

import art_core as art
import art_http
from art_core.attribution import elsewhere
from art_core.errors import CallRefused
from art_core.plugin_api import inside_rollout
from art_core.testing import CountingLearner, FakeEngine, check_adapter
from art_core.types import RolloutAddress
from framework_table import agents_of, assert_documented, user

KEY = {"authorization": "Bearer the-providers-own"}


def body(text, **more):
    return {"model": "m", "messages": user(text), **more}


def said(answer):
    if "choices" not in answer:
        raise ValueError(answer)
    return answer["choices"][0]["message"]["content"]


def with_httpx(library):
    def blocking(base_url):
        url = f"{base_url}/chat/completions"
        return lambda text: said(library.post(url, json=body(text), headers=KEY, timeout=60).json())

    def asynchronous(base_url):
        async def agent(text):
            async with library.AsyncClient(headers=KEY, timeout=60) as client:
                return said((await client.post(f"{base_url}/chat/completions", json=body(text))).json())

        return agent

    def streaming(base_url):
        async def agent(text):
            request = "POST", f"{base_url}/chat/completions"
            async with (
                library.AsyncClient(timeout=60) as client,
                client.stream(*request, json=body(text, stream=True)) as answer,
            ):
                if answer.status_code != 200:
                    raise ValueError(await answer.aread())
                return streamed([line async for line in answer.aiter_lines()])

        return agent

    return agents_of(asynchronous, blocking, streaming)


def with_requests():
    def blocking(base_url):
        url = f"{base_url}/chat/completions"
        return lambda text: said(requests.post(url, json=body(text), headers=KEY, timeout=60).json())

    def streaming(base_url):
        def agent(text):
            url = f"{base_url}/chat/completions"
            with requests.post(url, json=body(text, stream=True), stream=True, timeout=60) as answer:
                answer.raise_for_status()
                return streamed([line.decode() for line in answer.iter_lines()])

        return agent

    return agents_of(in_thread(blocking), blocking, streaming)


def with_urllib():
    def blocking(base_url):
        def agent(text):
            return said(json.loads(b"".join(lines_of(base_url, body(text)))))

        return agent

    def streaming(base_url):
        def agent(text):
            return streamed([line.decode().strip() for line in lines_of(base_url, body(text, stream=True))])

        return agent

    return agents_of(in_thread(blocking), blocking, streaming)


def lines_of(base_url, content):
    headers = {**KEY, "content-type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(content).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return list(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise ValueError(error.read()) from None


def with_aiohttp():
    def asynchronous(base_url):
        async def agent(text):
            url = f"{base_url}/chat/completions"
            async with aiohttp.ClientSession(headers=KEY) as session, session.post(url, json=body(text)) as answer:
                return said(await answer.json())

        return agent

    def streaming(base_url):
        async def agent(text):
            content = body(text, stream=True)
            async with (
                aiohttp.ClientSession(raise_for_status=True) as session,
                session.post(f"{base_url}/chat/completions", json=content) as answer,
            ):
                return streamed([line.decode().strip() async for line in answer.content])

        return agent

    return agents_of(asynchronous, None, streaming)


def in_thread(blocking):
    def make(base_url):
        ask = blocking(base_url)

        async def agent(text):
            return await asyncio.to_thread(ask, text)

        return agent

    return make


def streamed(lines):
    events = [json.loads(line[5:]) for line in lines if line.startswith("data:") and "[DONE]" not in line]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


CLIENTS = {
    "httpx": lambda: with_httpx(httpx),
    "httpx2": lambda: with_httpx(httpx2),
    "requests": with_requests,
    "urllib": with_urllib,
    "aiohttp": with_aiohttp,
}


@pytest.mark.system
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.usefixtures("trap_network")
async def test_agents_with_this_client_keep_every_rule_of_an_adapter(client):
    packages = {"httpx", "requests", "aiohttp"}
    report = await check_adapter(CLIENTS[client](), framework=client, plugin=art_http, packages=packages)
    assert_documented(report, "Python's" if client == "urllib" else None)


CHAT = "https://api.groq.com/openai/v1/chat/completions"
MESSAGES = "https://api.anthropic.com/v1/messages"


def post_with_aiohttp(url, content, **options):
    async def ask():
        async with aiohttp.ClientSession(**options) as session, session.post(url, json=content) as answer:
            return await answer.json()

    return asyncio.run(ask())


def post_over_socket(url, content):
    async def ask():
        connector = aiohttp.UnixConnector("/none")
        async with aiohttp.ClientSession(connector=connector) as session, session.post(url, json=content) as answer:
            return await answer.json()

    return asyncio.run(ask())


def post_with_urllib(url, content):
    request = urllib.request.Request(url, json.dumps(content).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def post_with_async_httpx(url, content, **options):
    async def ask():
        async with httpx.AsyncClient(**options) as client:
            return (await client.post(url, json=content)).json()

    return asyncio.run(ask())


NOWHERE = "http://127.0.0.1:1"
POSTS = {
    "httpx": lambda url, content: httpx.post(url, json=content).json(),
    "httpx, async": post_with_async_httpx,
    "httpx behind a proxy": lambda url, content: httpx.post(url, json=content, proxy=NOWHERE).json(),
    "httpx behind a proxy, async": lambda *call: post_with_async_httpx(*call, proxy=NOWHERE),
    "httpx over a socket": lambda *call: post_with_async_httpx(*call, transport=httpx.AsyncHTTPTransport(uds="/none")),
    "httpx2": lambda url, content: httpx2.post(url, json=content).json(),
    "requests": lambda url, content: requests.post(url, json=content).json(),
    "requests behind a proxy": lambda url, content: requests.post(url, json=content, proxies={"https": NOWHERE}).json(),
    "urllib": post_with_urllib,
    "aiohttp": post_with_aiohttp,
    "aiohttp behind a proxy": lambda *call: post_with_aiohttp(*call, proxy=NOWHERE),
    "aiohttp with a base URL": lambda *call: post_with_aiohttp(*call, base_url="https://api.groq.com/openai/"),
    "aiohttp over a socket": post_over_socket,
    "urllib3 without a port": lambda url, content: (
        urllib3.HTTPSConnectionPool(urlsplit(url).hostname).request("POST", urlsplit(url).path, json=content).json()
    ),
}


@pytest.fixture
async def run(tmp_path):
    async with art.open_run(tmp_path / "run", engine=FakeEngine("four"), learner=CountingLearner()) as opened:
        yield opened


async def rolled_out(run, function):
    """The trajectory of one rollout of ``function``, in a thread as a user's."""
    [group] = await run.collect(lambda task: function(), ["a"], group_size=1, allow_no_calls=True)
    return group.trajectories[0]


@pytest.mark.parametrize("client", POSTS)
async def test_a_call_to_a_provider_is_answered_by_the_policy_whatever_sends_it(client, run):
    content = {"model": "m", "max_tokens": 9, "messages": user("hi")}
    trajectory = await rolled_out(run, lambda: [POSTS[client](CHAT, content), POSTS[client](MESSAGES, content)])
    assert trajectory.error is None
    chat, message = trajectory.output
    assert (said(chat), message["content"][0]["text"]) == ("four", "four")
    assert len(trajectory.calls) == 2


CREDENTIALS = {
    "Authorization": "Basic secret", "x-api-key": "secret", "api-key": "secret", "Cookie": "id=secret",
    "OpenAI-Organization": "secret", "OpenAI-Project": "secret", "X-Gateway-Key": "secret",
}  # fmt: skip
TITLE = "Zürich".encode()
"""A header that isn't ASCII."""


def with_session_keys(url, content):
    session = requests.Session()
    session.headers.update({**CREDENTIALS, "x-title": TITLE})
    return session.post(url, json=content, auth=("me", "secret"), cookies={"id": "secret"}).json()


def with_client_keys(url, content):
    with httpx.Client(headers=[*CREDENTIALS.items(), (b"x-title", TITLE)], auth=("me", "secret")) as client:
        return client.post(url, json=content, params={"key": "secret"}).json()


def with_pool_keys(url, content):
    with urllib3.PoolManager(headers={**CREDENTIALS, "x-title": TITLE}) as pool:
        return pool.request("POST", f"{url}?key=secret", json=content).json()


def with_aiohttp_keys(url, content):
    async def ask():
        kept = {"headers": CREDENTIALS | {"x-title": TITLE.decode()}, "cookies": {"id": "secret"}}
        async with (
            aiohttp.ClientSession(**kept) as session,
            session.post(url, json=content, params={"key": "secret"}) as answer,
        ):
            return await answer.json()

    return asyncio.run(ask())


def at(url, *passthrough):
    """A rollout's address, on a server of the test."""
    return RolloutAddress("r1", f"{url}/rollouts/r1/v1", "key", "policy", frozenset(passthrough))


@pytest.mark.parametrize("post", [with_session_keys, with_client_keys, with_pool_keys, with_aiohttp_keys])
def test_the_providers_keys_stay_here(post, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_CUSTOM_HEADERS", "x-title-of: me\nx-gateway-key: secret")
    seen = []

    async def answer(request):
        seen.append((request.url.path, str(request.url.query), dict(request.headers)))
        return JSONResponse({"policy": True})

    art_http.redirect_clients()
    with serving(Route("/{path:path}", answer, methods=["POST"])) as url, inside_rollout(at(url)):
        assert post(CHAT, {"model": "m", "messages": []}) == {"policy": True}
    [(path, query, headers)] = seen
    assert (path, query, headers["authorization"]) == ("/rollouts/r1/v1/chat/completions", "", "Bearer key")
    assert "secret" not in json.dumps(headers)
    assert headers["host"] == url.removeprefix("http://") and headers["x-title"].encode("latin-1") == TITLE


@pytest.mark.parametrize("post", [with_session_keys, with_client_keys, with_pool_keys, with_aiohttp_keys])
def test_in_a_live_rollout_a_request_keeps_its_keys_and_says_where_it_goes(post):
    seen = []

    async def answer(request):
        seen.append((request.url.path, dict(request.headers)))
        return JSONResponse({"provider": True})

    art_http.redirect_clients()
    with (
        serving(Route("/{path:path}", answer, methods=["POST"])) as url,
        inside_rollout(dataclasses.replace(at(url), live=True)),
    ):
        assert post(CHAT, {"model": "m", "messages": []}) == {"provider": True}
    [(path, headers)] = seen
    assert path == "/rollouts/r1/v1/chat/completions"
    assert headers["x-art-url"].replace(":443/", "/") == CHAT + ("" if post is with_session_keys else "?key=secret")
    assert headers["authorization"].startswith("Basic ") and "Bearer" not in headers["authorization"]
    assert {headers["x-api-key"], headers["api-key"]} == {"secret"} and "secret" in headers["cookie"]
    assert headers["x-title"].encode("latin-1") == TITLE


async def test_a_body_that_cannot_be_read_is_refused_if_its_model_might_pass_through(run):
    stream = [json.dumps(body("hi")).encode()]
    trajectory = await rolled_out(run, lambda: httpx.post(CHAT, content=iter(stream)).json())
    assert said(trajectory.output) == "four"
    with inside_rollout(at(NOWHERE, "other")), pytest.raises(CallRefused):
        httpx.post(CHAT, content=iter(stream))


def test_a_time_limit_of_the_callers_pool_holds():
    art_http.redirect_clients()
    release = threading.Event()

    def late(_):
        release.wait(60)
        return JSONResponse({})

    pool = urllib3.PoolManager(timeout=0.2, retries=False)
    with pool, serving(Route("/{path:path}", late, methods=["POST"])) as url, inside_rollout(at(url)):
        with pytest.raises(urllib3.exceptions.ReadTimeoutError):
            pool.request("POST", CHAT, json={"model": "m", "messages": []})
        release.set()


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("responses", {"input": "hi"}),
        ("responses/input_tokens", {"input": "hi"}),
        ("messages/count_tokens", {"messages": user("hi")}),
        ("models/gemini-3-pro:generateContent", {"contents": [{"parts": [{"text": "hi"}]}]}),
        ("models/gemini-3-pro:countTokens", {"contents": [{"parts": [{"text": "hi"}]}]}),
    ],
)
async def test_every_dialect_of_the_gateway_is_reached(run, path, content):
    url = f"https://api.openai.com/v1/{path}"
    trajectory = await rolled_out(
        run, lambda: httpx.post(url, json={"model": "m", **content}).raise_for_status().json()
    )
    assert trajectory.error is None
    counted = {name for name in trajectory.output if name in ("input_tokens", "totalTokens")}
    assert len(trajectory.calls) == (0 if counted else 1)


GENAI = {
    "interactions": lambda client: client.interactions.create(model="gemini-3-pro", input="hi"),
    "decisions": lambda client: client.decisions.create(
        model="models/gemini-3-pro", input="hi", questions={"q": {"type": "noul", "instructions": "Is it?"}}
    ),
    "models/gemini-3-pro:batchGenerateContent": lambda client: client.batches.create(
        model="gemini-3-pro", src=[{"contents": "hi"}]
    ),
}


@pytest.mark.parametrize("path", GENAI)
@pytest.mark.usefixtures("trap_network")
async def test_what_googles_client_can_ask_beside_content_is_refused(run, path):
    def ask():
        with genai.Client(api_key="k") as client:
            return GENAI[path](client)

    trajectory = await rolled_out(run, ask)
    where = f"POST generativelanguage.googleapis.com/v1/{path}"
    assert f"{where} (model" in trajectory.error and "was refused before it left" in trajectory.error


async def test_what_no_dialect_answers_is_refused(run):
    url = "https://aiplatform.googleapis.com/v1/projects/p/publishers/anthropic/models/some.model:rawPredict"
    trajectory = await rolled_out(run, lambda: httpx.post(url, json={"messages": []}))
    assert "some.model" in trajectory.error and "was refused before it left" in trajectory.error


@pytest.mark.system
def test_claude_code_is_kept_at_the_address_of_the_rollout_that_starts_it():
    print_environment = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    with inside_rollout(at("http://127.0.0.1:1")):
        found = json.loads(subprocess.run(print_environment, capture_output=True, check=True).stdout)
    assert found["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1/rollouts/r1"
    assert (found["CLAUDE_CODE_PROVIDER_MANAGED_BY_HOST"], found["CLAUDE_CODE_USE_BEDROCK"]) == ("1", "")
    assert "CLAUDE_CODE_USE_BEDROCK" not in os.environ


def test_a_model_that_passes_through_and_calls_outside_of_rollouts_keep_address_and_keys(monkeypatch):
    sent = []

    def send(self, request):
        sent.append((str(request.url), request.headers.get("authorization")))
        return httpx.Response(200, json={}, request=request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", send)
    art_http.redirect_clients()
    with inside_rollout(at(NOWHERE, "other")):
        httpx.post(CHAT, json={"model": "other", "messages": []}, headers=KEY)
        assert elsewhere("r1")["passed"] == {"POST api.groq.com/openai/v1/chat/completions": 1}
        httpx.post(CHAT, json={"model": "m", "messages": []}, headers=KEY)
    httpx.post(CHAT, json={"model": "m", "messages": []}, headers=KEY)
    ours = f"{NOWHERE}/rollouts/r1/v1/chat/completions", "Bearer key"
    assert sent == [(CHAT, KEY["authorization"]), ours, (CHAT, KEY["authorization"])]


async def test_a_connection_of_http_client_reaches_its_own_host_again_afterwards(run):
    def both(host):
        connection = http.client.HTTPConnection(host)
        answers = []
        for path, content in (("/v1/chat/completions", body("hi")), ("/tools", {})):
            connection.request("POST", path, json.dumps(content))
            answers.append(json.load(connection.getresponse()))
        connection.close()
        return answers

    own = Route("/{path:path}", lambda _: JSONResponse({"own": True}), methods=["POST"])
    with serving(own) as url:
        trajectory = await rolled_out(run, lambda: both(url.removeprefix("http://")))
    assert said(trajectory.output[0]) == "four" and trajectory.output[1] == {"own": True}
