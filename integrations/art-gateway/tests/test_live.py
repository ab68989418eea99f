"""A live evaluation: the agent's own provider answers as if nothing were between them, and every call is recorded as text."""

import asyncio
import json
import os
import subprocess
import sys
import threading

import httpx
import openai
import pytest
from http_server import serving_app
from typer.testing import CliRunner

import art_core as art
from art_cli.main import app
from art_core.errors import CaptureError, ConfigError
from art_core.plugin_api import inside_rollout
from art_core.store import Store
from art_core.testing import FakeEngine
from art_core.types import RolloutAddress

TASKS = ["Please do task-001.", "Please do task-002."]
TOOL = {"type": "object", "properties": {"q": {"type": "string"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "look", "parameters": TOOL}}
QUESTION = [{"role": "user", "content": "Please do task-001."}]
PARTS = [{"role": "user", "parts": [{"text": "Please do task-001."}]}]


def live(agent, run_dir, tasks=TASKS, **settings):
    settings = {"reward": lambda trajectory: 1.0, "progress": False, **settings}
    return art.evaluate_sync(agent, tasks, model="live", run_dir=run_dir, **settings)


def post(provider, path, body, **headers):
    """Send what a client of the API sends, and return the answer."""
    return httpx.post(provider.base_url.removesuffix("/v1") + path, json=body, headers=headers, trust_env=False)


def test_the_provider_gets_the_agents_own_requests(provider, tmp_path):
    def agent(task):
        client = openai.OpenAI(base_url=provider.base_url, api_key="sk-own", default_headers={"x-mine": "own"})
        answer = client.chat.completions.create(model="gpt-x", messages=[{"role": "user", "content": task}], seed=3)
        return answer.choices[0].message.content

    def without_encoding(requests):
        return [
            (it.path, [h for h in it.headers if h[0] not in ("accept-encoding", "connection")], it.body)
            for it in requests
        ]

    answers = [agent(task) for task in TASKS]
    own = without_encoding(provider.requests)
    provider.requests.clear()
    report = live(agent, tmp_path / "run")
    assert [trajectory.output for trajectory in report.trajectories] == answers
    assert sorted(without_encoding(provider.requests)) == sorted(own)
    assert ("authorization", "Bearer sk-own") in own[0][1]


GOOGLE_TOOLS = [{"functionDeclarations": [{"name": "look", "parametersJsonSchema": TOOL}]}]
AMAZON_TOOLS = {"tools": [{"toolSpec": {"name": "look", "inputSchema": {"json": TOOL}}}]}
OF_ANTHROPIC = {"max_tokens": 9, "messages": QUESTION, "tools": [{"name": "look", "input_schema": TOOL}]}
OF_OPENAI = {"model": "m", "messages": QUESTION, "tools": [CHAT_TOOL]}
OF_RESPONSES = {"model": "m", "input": QUESTION, "tools": [{"type": "function", "name": "look", "parameters": TOOL}]}
OF_GOOGLE = {"model": "m", "contents": PARTS, "tools": GOOGLE_TOOLS}
OF_AMAZON = {"messages": [{"role": "user", "content": [{"text": "Please do task-001."}]}], "toolConfig": AMAZON_TOOLS}
STREAM = {"stream": True}
CASES = {
    "/v1/chat/completions": (OF_OPENAI, "/v1/chat/completions", STREAM | {"stream_options": {"include_usage": True}}),
    "/v1/responses": (OF_RESPONSES, "/v1/responses", STREAM),
    "/v1/messages": ({"model": "m", **OF_ANTHROPIC}, "/v1/messages", STREAM),
    "/v1beta/models/m:generateContent": (OF_GOOGLE, "/v1beta/models/m:streamGenerateContent?alt=sse", {}),
    "/api/chat": ({**OF_OPENAI, "stream": False}, "/api/chat", STREAM),
    "/model/m/converse": (OF_AMAZON, "/model/m/converse-stream", {}),
    "/model/m/invoke": (
        {"anthropic_version": "bedrock-2023-05-31", **OF_ANTHROPIC},
        "/model/m/invoke-with-response-stream",
        {},
    ),
}
"""Path -> a request, and the path and what else the request has if it streams."""


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", CASES)
def test_every_dialect_is_recorded_as_chat_messages(provider, tmp_path, path, streams):
    body, stream_path, more = CASES[path]
    url, body = (stream_path, body | more) if streams else (path, body)
    body = {"model": "m", **body}  # by which a host that is not a provider's is recognised
    report = live(lambda task: post(provider, url, body).status_code, tmp_path / "run", TASKS[:1])
    [call] = report.trajectories[0].calls
    assert report.trajectories[0].output == 200
    assert call.request["messages"][-1]["content"] == "Please do task-001."
    function = call.response["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("look", {"q": "task-001"})
    assert call.request["model"] == "m" and call.policy_version == -1 and not call.prompt_ids
    assert min(call.usage[name] for name in ("seconds", "prompt_tokens", "completion_tokens")) > 0


def test_calls_and_their_usage_survive_in_the_run_folder(provider, tmp_path):
    report = live(lambda task: post(provider, "/v1/chat/completions", OF_OPENAI).text, tmp_path / "run")
    with Store(tmp_path / "run" / "run.sqlite") as store:
        assert store.meta("model") == "live"
        for trajectory in report.trajectories:
            assert store.calls(trajectory.rollout_id) == trajectory.calls


@pytest.mark.system
def test_a_program_that_the_agent_starts_is_recorded_too(provider, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", provider.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
    chat = "openai.OpenAI().chat.completions.create(model='m', messages=[{'role': 'user', 'content': 'Please do task-001.'}])"
    program = f"import openai; print({chat}.id)"

    def agent(task):
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout

    report = live(agent, tmp_path / "run", TASKS[:1])
    assert report.trajectories[0].calls[0].response["content"] == "answer to task-001"
    assert ("authorization", "Bearer sk-own") in provider.requests[0].headers


def test_a_providers_refusal_reaches_the_agent_unchanged_and_is_no_call(tmp_path):
    async def busy(scope, receive, send):
        headers = [(b"retry-after", b"0"), (b"content-type", b"application/json"), (b"x-own", b"1")]
        await send({"type": "http.response.start", "status": 429, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "slow down"}}'})

    with serving_app(busy) as url:

        def agent(task):
            answer = httpx.post(
                f"{url}/v1/chat/completions", json={"model": "m", "messages": QUESTION}, trust_env=False
            )
            assert (answer.status_code, answer.headers["x-own"], answer.json()["error"]["message"]) == (
                429,
                "1",
                "slow down",
            )
            raise RuntimeError("too busy")

        with pytest.raises(CaptureError, match="too busy"):
            live(agent, tmp_path / "run", TASKS[:1])


def test_a_stream_arrives_as_the_provider_sends_it(tmp_path):
    first_read = threading.Event()
    chunk = {"choices": [{"index": 0, "delta": {"content": "one "}}]}

    async def slow(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for _ in range(2):
            await send(
                {
                    "type": "http.response.body",
                    "body": b"data: " + json.dumps(chunk).encode() + b"\n\n",
                    "more_body": True,
                }
            )
            await asyncio.to_thread(first_read.wait, 30)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    with serving_app(slow) as url:

        def agent(task):
            with httpx.stream(
                "POST",
                f"{url}/v1/chat/completions",
                json={"model": "m", "messages": QUESTION, "stream": True},
                trust_env=False,
            ) as answer:
                lines = answer.iter_lines()
                text = next(lines)
                first_read.set()
                return [text, *lines].count(text)

        report = live(agent, tmp_path / "run", TASKS[:1])
    assert report.trajectories[0].output == 2
    assert report.trajectories[0].calls[0].response["content"] == "one one "


def answering(status, *parts, headers=(), rest=0):
    """An ASGI application that sends these parts, and breaks off if ``rest`` bytes of its content-length are missing."""

    async def app(scope, receive, send):
        length = [(b"content-length", str(sum(map(len, parts)) + rest).encode())] if rest else []
        await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if rest:
            raise ConnectionError("on purpose")
        await send({"type": "http.response.body", "body": b""})

    return app


def ask(url, **options):
    return httpx.post(f"{url}/v1/chat/completions", json=OF_OPENAI, trust_env=False, **options)


def test_an_answer_that_breaks_off_is_an_error_that_clients_retry_and_no_call(tmp_path):
    def agent(task):
        answer = ask(url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_unreachable")

    with serving_app(answering(200, b'{"choices": [{"ind', rest=50)) as url, pytest.raises(CaptureError):
        live(agent, tmp_path / "run", TASKS[:1])


@pytest.mark.parametrize("status", [204, 307, 404, 500])
def test_what_is_no_answer_is_no_call(tmp_path, status):
    with serving_app(answering(status, headers=[(b"location", b"/elsewhere")])) as url, pytest.raises(CaptureError):
        live(lambda task: ask(url).status_code, tmp_path / "run", TASKS[:1])


def test_a_stream_that_breaks_off_is_recorded_as_aborted_with_its_text(tmp_path):
    chunk = b'data: {"choices": [{"index": 0, "delta": {"content": "one "}}]}\n\n'
    with serving_app(answering(200, chunk, chunk[:20])) as url:
        report = live(lambda task: ask(url).status_code, tmp_path / "run", TASKS[:1])
    [call] = report.trajectories[0].calls
    assert (call.response["content"], call.finish_reason) == ("one ", "aborted")


def test_a_call_is_recorded_before_its_last_event_is_sent(tmp_path):
    chunk = b'data: {"choices": [{"index": 0, "delta": {"content": "one"}, "finish_reason": "stop"}]}\n\n'
    closed = threading.Event()

    async def lingering(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": chunk + b"data: [DONE]\n\n", "more_body": True})
        await asyncio.to_thread(closed.wait, 30)
        await send({"type": "http.response.body", "body": b""})

    def agent(task):
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=OF_OPENAI, trust_env=False) as answer:
            next(line for line in answer.iter_lines() if line == "data: [DONE]")
        closed.set()

    with serving_app(lingering) as url:
        report = live(agent, tmp_path / "run", TASKS[:1])
    [call] = report.trajectories[0].calls
    assert (call.response["content"], call.finish_reason) == ("one", "stop")


def test_headers_reach_the_provider_as_they_are(provider, tmp_path):
    headers = [("x-name", "Zoë".encode()), ("x-twice", b"1"), ("x-twice", b"2")]
    with serving_app(recorded := Recorded()) as url:
        live(lambda task: ask(url, headers=headers).status_code, tmp_path / "run", TASKS[:1])
    assert {(name, value) for name, value in headers if name != "x-twice"} <= {
        (n.decode(), v) for n, v in recorded.headers
    }
    assert [value for name, value in recorded.headers if name == b"x-twice"] in ([b"1", b"2"], [b"1, 2"])
    assert not [name for name, _ in recorded.headers if name.startswith(b"x-art")]


class Recorded:
    """Remembers the headers of a request."""

    async def __call__(self, scope, receive, send):
        self.headers = scope["headers"]
        await answering(200, b'{"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}')(
            scope, receive, send
        )


@pytest.mark.system
def test_a_program_with_another_provider_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    seen = []
    with inside_rollout(RolloutAddress("r", "http://127.0.0.1:2/rollouts/r/v1", "art-rollout", "policy", live=True)):
        for base in ("http://127.0.0.1:1/v1", "https://openrouter.ai/api/v1", None):
            env = {"PATH": os.environ["PATH"], "OPENAI_API_KEY": "own"} | ({"OPENAI_BASE_URL": base} if base else {})
            code = "import os; print(os.environ.get('OPENAI_BASE_URL'), os.environ['OPENAI_API_KEY'])"
            seen.append(
                subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout.split()
            )
    ours = "http://127.0.0.1:2/rollouts/r/v1"
    assert seen == [[ours, "own"], ["https://openrouter.ai/api/v1", "own"], ["None", "own"]]


def test_an_agent_that_uses_the_address_itself_is_refused(tmp_path):
    def agent(task, address):
        headers = {"authorization": f"Bearer {address.api_key}"}
        answer = httpx.post(f"{address.base_url}/chat/completions", json=OF_OPENAI, headers=headers, trust_env=False)
        raise RuntimeError(answer.json()["error"]["message"])

    with pytest.raises(CaptureError, match="the agent called this address itself"):
        live(agent, tmp_path / "run", TASKS[:1])


def test_live_is_for_evaluations_without_a_temperature(tmp_path):
    with pytest.raises(ConfigError, match="can't be trained"):
        art.train_sync(lambda task: task, TASKS, model="live", reward=lambda t: 1.0, steps=1, run_dir=tmp_path / "run")
    for settings in ({"temperature": 1.0}, {"engine": FakeEngine()}):
        with pytest.raises(ConfigError, match="drop temperature= and engine="):
            live(lambda task: task, tmp_path / "run", **settings)


def test_without_what_records_the_calls_nothing_is_run(tmp_path, monkeypatch):
    monkeypatch.setenv("ART_DISABLE_PLUGINS", "http")
    monkeypatch.setitem(sys.modules, "art_http", None)
    with pytest.raises(ConfigError, match="pip install -e plugins/art-http"):
        live(lambda task: pytest.fail("the agent was run"), tmp_path / "run")


WITHOUT_TORCH = """
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "peft")))
from art_cli.main import main
main()
"""
APP = """
import openai

tasks = ["Please do task-001.", "Please do task-002."]

def agent(task):
    asked = [{"role": "user", "content": task}]
    return openai.OpenAI().chat.completions.create(model="gpt-x", messages=asked).choices[0].message.content

def reward(trajectory):
    return float(bool(trajectory.output))
"""


@pytest.mark.system
def test_a_baseline_needs_no_torch(provider, tmp_path):
    (tmp_path / "app.py").write_text(APP)
    named = ["app.py:agent", "app.py:tasks", "--reward", "app.py:reward", "--live", "--run-dir", "run"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "eval", *named], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"OPENAI_BASE_URL": provider.base_url, "OPENAI_API_KEY": "sk-own"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mean_reward"] == 1 and len(provider.requests) == 2


AGENT = """
import openai

def agent(task):
    client = openai.OpenAI(base_url={url!r}, api_key="k", max_retries=0)
    return client.chat.completions.create(model="m", messages=[{{"role": "user", "content": task}}])

def reward(trajectory):
    return 0.0
"""


@pytest.mark.system
def test_art_eval_counts_failed_rollouts_and_names_the_most_frequent_error(provider, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "live_agent.py").write_text(AGENT.format(url=provider.base_url))
    tasks = [f"Please do {name}." for name in ("refused-000", "refused-000", "task-001")]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    options = ["--reward", "live_agent.py:reward", "--live", "--run-dir", "run"]
    result = CliRunner().invoke(app, ["eval", "live_agent.py:agent", "tasks.json", *options])
    assert result.exit_code == 0, result.output
    assert "2 of 3 rollouts failed, most often: BadRequestError: " in result.stderr
    assert "starting the engine" not in result.stderr
    report = json.loads(result.stdout)
    assert report["failed"] == 2 and "refused-000 is refused" in report["error"]
