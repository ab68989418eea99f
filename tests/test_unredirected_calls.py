"""Inside a rollout a model call that was not redirected fails before it leaves, and the run says so; everything else is left
alone."""

import asyncio
import io
import json
import socket
import ssl
import subprocess
import sys
import threading
import urllib.request

import aiohttp
import anthropic
import httpx
import httpx2
import pytest
import requests
from rich.console import Console

import art_core as art
from art_core.attribution import elsewhere, exempt, inside_rollout
from art_core.attribution.providers import at_provider, model_call
from art_core.errors import CallRefused, CaptureError, UpstreamError
from art_core.loop.display import Display
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent
from art_core.types import RolloutAddress

pytestmark = pytest.mark.usefixtures("not_at_the_wire")

URL = "https://api.anthropic.com/v1/messages"
BODY = {"model": "claude", "messages": [{"role": "user", "content": "hi"}]}


def address(*passthrough: str, nodes: tuple[str, ...] = ()) -> RolloutAddress:
    return RolloutAddress(
        "r1", "http://127.0.0.1:1/rollouts/r1/v1", "key", "policy", frozenset(passthrough), tuple(nodes)
    )


def with_urllib() -> None:
    urllib.request.urlopen(urllib.request.Request(URL, json.dumps(BODY).encode()))


def with_aiohttp() -> None:
    async def ask() -> None:
        async with aiohttp.ClientSession() as session, session.post(URL, json=BODY):
            pass

    asyncio.run(ask())


def with_async(library) -> None:
    async def ask() -> None:
        async with library.AsyncClient() as client:
            await client.post(URL, json=BODY)

    asyncio.run(ask())


CLIENTS = {
    "httpx": lambda: httpx.post(URL, json=BODY),
    "httpx, async": lambda: with_async(httpx),
    "httpx2": lambda: httpx2.post(URL, json=BODY),
    "httpx2, async": lambda: with_async(httpx2),
    "urllib3": lambda: requests.post(URL, json=BODY),
    "http": with_urllib,
    "aiohttp": with_aiohttp,
}


@pytest.mark.parametrize("client", CLIENTS)
def test_a_call_that_was_not_redirected_fails_before_it_leaves(client):
    with inside_rollout(address()):
        with pytest.raises(CallRefused) as refused:
            CLIENTS[client]()
        assert elsewhere("r1") == {"refused": {"POST api.anthropic.com/v1/messages": 1}, "passed": {}}
    said = str(refused.value)
    assert f"POST api.anthropic.com/v1/messages (model 'claude', sent by {client.partition(',')[0]})" in said
    assert "passthrough=" in said and "address.base_url" in said


@pytest.mark.parametrize("client", CLIENTS)
def test_a_call_fails_on_a_thread_that_the_rollout_started(client):
    caught = []

    def ask() -> None:
        try:
            CLIENTS[client]()
        except CallRefused as error:
            caught.append(error)

    with inside_rollout(address()):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert len(caught) == 1


def test_an_sdk_that_retries_exceptions_is_refused_once_with_a_reason_that_it_shows():
    client = anthropic.Anthropic(api_key="fake")
    with inside_rollout(address()):
        with pytest.raises(anthropic.PermissionDeniedError, match="refused before it left.*passthrough="):
            client.messages.create(model="claude", max_tokens=9, messages=BODY["messages"])
        assert sum(elsewhere("r1")["refused"].values()) == 1


@pytest.fixture
def sent(monkeypatch):
    """What leaves, by httpx."""
    urls = []

    def send(self, request):
        urls.append(str(request.url))
        return httpx.Response(200, json={}, request=request)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", send)
    return urls


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("https://api.openai.com/v1/embeddings", {"model": "e", "input": "text"}),
        ("https://api.openai.com/v1/audio/speech", {"model": "tts", "input": "text"}),
        ("https://api.openai.com/v1/moderations", {"input": "text"}),
        ("https://api.openai.com/v1/files", {}),
        ("https://api.openai.com/v1/traces/ingest", {"data": []}),
        (
            "https://bedrock-runtime.us-east-1.amazonaws.com/model/amazon.titan-embed-text-v2:0/invoke",
            {"inputText": "t"},
        ),
        ("https://forms.example/v1/responses", {"answer": 3}),
        ("https://shop.example/api/chat", {"messages": ["to a person"]}),
        ("http://127.0.0.1:1/rollouts/r1/v1/chat/completions", BODY),
    ],
)
def test_what_asks_no_model_for_text_leaves(url, body, sent):
    with inside_rollout(address()):
        httpx.post(url, json=body)
        assert elsewhere("r1") == {"refused": {}, "passed": {}}
    assert sent == [url]


def test_outside_a_rollout_and_inside_exempt_everything_leaves(sent):
    untouched = vars(httpx.HTTPTransport)["handle_request"], vars(ssl.SSLContext)["wrap_bio"]
    httpx.post(URL, json=BODY)
    with inside_rollout(address()):
        with exempt():
            httpx.post(URL, json=BODY)
        assert elsewhere("r1") == {"refused": {}, "passed": {}}
    httpx.post(URL, json=BODY)
    assert len(sent) == 3
    assert (vars(httpx.HTTPTransport)["handle_request"], vars(ssl.SSLContext)["wrap_bio"]) == untouched


def test_the_connection_of_a_request_that_may_leave_is_not_refused(monkeypatch):
    url = "https://api.openai.com/v1/embeddings"

    def send(self, request):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=request.url.host)
        return httpx.Response(200, request=request)

    async def send_async(self, request):
        return send(self, request)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient() as client:
            return await client.post(url)

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", send)
    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", send_async)
    with inside_rollout(address()):
        assert httpx.post(url).status_code == asyncio.run(ask()).status_code == 200
        with pytest.raises(CallRefused):
            send(None, httpx.Request("POST", url))


@pytest.mark.parametrize("name", ["claude", "anthropic/claude"])
def test_a_model_that_passes_through_leaves_and_is_counted(name, sent):
    with inside_rollout(address(name)):
        httpx.post(URL, json=BODY)
        with pytest.raises(CallRefused):
            httpx.post(URL, json={**BODY, "model": "another"})
        assert elsewhere("r1") == {
            "refused": {"POST api.anthropic.com/v1/messages": 1},
            "passed": {"POST api.anthropic.com/v1/messages": 1},
        }
    assert sent == [URL]


def test_the_calls_of_nodes_that_are_not_trained_leave(sent):
    with inside_rollout(address(nodes=("writer",))):  # nobody is named here
        httpx.post(URL, json=BODY)
        assert elsewhere("r1")["passed"] == {"POST api.anthropic.com/v1/messages": 1}


def test_a_thread_that_cannot_be_attributed_calls_no_provider(sent):
    caught, go = [], threading.Event()

    def ask() -> None:
        go.wait()
        httpx.post("http://127.0.0.1:9/v1/chat/completions", json=BODY)  # may be ours: an engine's, say
        try:
            httpx.post(URL, json=BODY)
        except CallRefused as error:
            caught.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    with inside_rollout(address()):
        go.set()
        thread.join()
    assert len(caught) == 1 and "cannot be attributed to a rollout" in caught[0]
    assert sent == ["http://127.0.0.1:9/v1/chat/completions"]


def test_a_client_with_sockets_of_its_own_is_refused_where_it_begins_tls():
    context = ssl.create_default_context()
    ours, theirs = socket.socketpair()
    with ours, theirs, inside_rollout(address()):
        with pytest.raises(CallRefused, match=r"a connection to api\.anthropic\.com"):
            context.wrap_socket(ours, server_hostname="api.anthropic.com")
        with pytest.raises(CallRefused):
            context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), False, "api.openai.com")
        assert elsewhere("r1")["refused"] == {"api.anthropic.com": 1, "api.openai.com": 1}
        context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="pypi.org")


@pytest.mark.system
def test_a_library_may_be_imported_when_the_rollout_is_live_already():
    program = f"""
import sys
from art_core.attribution import inside_rollout
from art_core.types import RolloutAddress
from art_core.errors import CallRefused
assert not {{"httpx", "http.client"}} & sys.modules.keys(), sys.modules.keys()
with inside_rollout(RolloutAddress("r1", "http://127.0.0.1:1/rollouts/r1/v1", "key", "policy")):
    import httpx, urllib.request
    for ask in (lambda: httpx.post("{URL}", json={{}}), lambda: urllib.request.urlopen("{URL}", b"")):
        try:
            ask()
        except CallRefused:
            print("refused")
assert httpx.HTTPTransport.handle_request.__module__.startswith("httpx")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["refused"] * 2, done.stderr


@pytest.mark.parametrize(
    ("url", "model"),
    [
        ("https://me.openai.azure.com/openai/deployments/gpt/chat/completions", "gpt"),
        ("https://generativelanguage.googleapis.com/v1beta/models/gemini-pro:streamGenerateContent", "gemini-pro"),
        ("https://eu-aiplatform.googleapis.com/v1/projects/p/publishers/google/models/gem:generateContent", "gem"),
        (
            "https://bedrock-runtime.eu-west-1.amazonaws.com/model/anthropic.claude-v2%3A1/converse",
            "anthropic.claude-v2:1",
        ),
        ("https://api.openai.com/v1/responses/input_tokens", None),
        ("https://api.anthropic.com/v1/messages/count_tokens", None),
        ("https://openrouter.ai/api/v1/chat/completions", None),
        ("https://router.huggingface.co/v1/chat/completions", None),
        ("https://api.cohere.com/v2/chat", None),
    ],
)
def test_requests_for_text_are_known_by_host_and_path(url, model):
    host, _, path = url.removeprefix("https://").partition("/")
    assert model_call("POST", host, f"/{path}", lambda: None) == (model, True)
    assert model_call("GET", host, f"/{path}", lambda: None) is None


def test_requests_for_text_at_other_hosts_are_known_by_their_bodies_too():
    ollama = {"model": "llama", "messages": []}
    assert model_call("POST", "localhost", "/api/chat", lambda: json.dumps(ollama)) == ("llama", False)
    assert model_call("POST", "localhost", "/api/chat", lambda: b"\xff") is None
    assert at_provider("API.OPENAI.COM") and not at_provider("api.openai.com.example.org")


class Halves:
    """Every run asks the policy once, and a provider once, whose refusal it survives."""

    def __init__(self) -> None:
        self._scripted = art.plugins.Plugins().adapt(ScriptedAgent())

    async def __call__(self, task, address):
        await self._scripted(task, address)
        try:
            httpx.post(URL, json=BODY)
        except CallRefused:
            return "went on"


async def trained(tmp_path, agent, **settings):
    told = io.StringIO()
    result = await art.train(
        agent, ["a"], model="tiny", steps=2, tasks_per_step=1, group_size=4, engine=FakeEngine(), learner=CountingLearner(),
        reward=lambda trajectory: trajectory.seconds, run_dir=tmp_path / "run",
        progress=Display(console=Console(file=told, width=1000)), **settings,
    )  # fmt: skip
    return result.report["calls_elsewhere"], told.getvalue()


async def test_a_training_says_at_every_step_and_in_its_report_what_was_refused(tmp_path):
    report, told = await trained(tmp_path, Halves().__call__)
    assert report == {"refused": {"POST api.anthropic.com/v1/messages": 8}, "passed": {}}
    for step in (1, 2):
        assert f"step {step}: 4 of 8 model calls did not reach the policy: 4 were refused before they left" in told
    assert json.loads((tmp_path / "run" / "report.json").read_text())["calls_elsewhere"] == report


async def test_a_training_says_what_passed_through(tmp_path, sent):
    report, told = await trained(tmp_path, Halves().__call__, passthrough=["claude"])
    assert report == {"refused": {}, "passed": {"POST api.anthropic.com/v1/messages": 8}}
    assert "4 went where the agent sends them, as passthrough=" in told and len(sent) == 8


async def test_a_training_whose_calls_all_reach_the_policy_says_nothing(tmp_path):
    report, told = await trained(tmp_path, ScriptedAgent())
    assert report == {"refused": {}, "passed": {}} and "did not reach" not in told


async def why(tmp_path, agent, **settings) -> str:
    async with art.open_run(tmp_path / "run", learner=CountingLearner(), **{"engine": FakeEngine()} | settings) as run:
        with pytest.raises(CaptureError) as refused:
            await run.collect(agent, ["a"], group_size=2)
    return str(refused.value)


async def test_calls_that_were_all_refused_before_they_left_are_the_reason(tmp_path):
    said = await why(tmp_path, lambda task: httpx.post(URL, json=BODY))
    assert "none of 2 model calls" in said and "before they left (POST api.anthropic.com/v1/messages)" in said
    assert "install the plugin of its client library" in said and f"(at {__file__}:" in said


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (400, "context_length_exceeded", "the prompt has 6102 tokens and the model holds 1024"),
        (401, None, "the upstream refused the key"),
        (502, None, "the upstream cannot be reached"),
    ],
)
async def test_what_the_policy_refused_is_told_with_status_and_message_and_without_plugins(
    tmp_path, status, code, message
):
    def refuse(request):
        raise UpstreamError(message, status=status, code=code)

    said = await why(tmp_path, ScriptedAgent(), engine=FakeEngine(refuse))
    assert f"refused by it, the first with: {status} {f'{code}: ' if code else ''}{message}" in said
    assert "plugin" not in said and "base_url" not in said


class ContextOverflow(Exception):
    """As a client that nobody knows calls it."""


def unknown_client(task):
    raise ContextOverflow("no answer")


def own_check(task):
    raise ValueError("a task needs a date")


@pytest.mark.parametrize(("agent", "advised"), [(unknown_client, True), (own_check, False)])
async def test_an_error_without_a_request_is_blamed_on_plugins_only_if_python_has_no_such_error(
    tmp_path, agent, advised
):
    said = await why(tmp_path, agent)
    assert "all 2 rollouts failed before a model call was recorded" in said
    assert ("plugin" in said) is advised
