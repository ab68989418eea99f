"""Keys go where they are sent, and nowhere else: not into logs, run folders, messages or pages, whatever a server says back."""

import base64
import io
import logging
import os

import httpx
import pytest
from http_server import serving
from rich.console import Console
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from vllm_like import vllm_like

import art_core as art
import art_langfuse
from art_core.capture import HttpUpstream
from art_core.capture.shape import check_answer
from art_core.config import TrainConfig
from art_core.errors import ConfigError, UpstreamError
from art_core.loop import display
from art_core.plugins import Plugins
from art_core.testing import CountingLearner, FakeEngine
from art_embedded import TINY
from art_langfuse.account import account
from art_ruler import Ruler
from art_server import TrainingClient, connect
from art_server.folders import RunFolders
from art_server.view import view_app
from art_vllm.command_line import options

VARIABLES = (
    "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "LANGFUSE_SECRET_KEY", "LANGFUSE_PUBLIC_KEY", "WANDB_API_KEY", "ART_SERVER_TOKEN",
    "ART_GATEWAY_API_KEY", "ART_UPSTREAM_API_KEY", "HF_TOKEN", "MY_DATABASE_PASSWORD", "TINKER_API_KEY",
)  # fmt: skip
MARK = "canary"
"""Stands in every key here, and in nothing else."""


def encoded(user, password):
    """A user and a password as the header has them."""
    return base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
def keys(monkeypatch):
    """Every variable that holds a key, with one."""
    for number, name in enumerate(VARIABLES):
        monkeypatch.setenv(name, f"sk-{MARK}-{number}-0123456789abcdef")
    return {name: os.environ[name] for name in VARIABLES}


@pytest.fixture
def echo():
    """A server that refuses every request and says all that it was sent with it: bodies are ours, headers hold the keys."""
    asked = []

    async def refuse(request: Request) -> JSONResponse:
        asked.append(dict(request.headers))
        told = f"refused: {request.url} {asked[-1]}"
        return JSONResponse({"error": {"message": told}, "message": told}, 400)

    with serving(Route("/{path:path}", refuse, methods=["GET", "POST"])) as url:
        yield url, asked


def held(folder, key):
    """Where under a folder it stands, in whatever file."""
    return [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and key.encode() in path.read_bytes()
    ]


def pages(folder):
    """All that the dashboard answers about a run: every GET route, for everything that there is."""
    with TestClient(view_app(RunFolders(folder)), base_url="http://127.0.0.1") as http:
        run = f"/api/runs/{folder.name}"
        found = [f"{run}{path}" for path in ("", "/metrics", "/groups", "/tasks", "/trajectories", "/checkpoints")]
        found += [f"{run}/trajectories/{it['rollout_id']}" for it in http.get(f"{run}/trajectories").json()["items"]]
        answers = [http.get(path) for path in ("/api/runs", "/openapi.json", *found)]
        assert all(it.status_code == 200 for it in answers)
        return [it.text for it in answers]


@pytest.mark.system
async def test_a_run_whose_agent_judge_and_tracker_are_refused_keeps_no_key(
    keys, echo, tmp_path, monkeypatch, caplog, capfd
):
    url, asked = echo
    monkeypatch.delenv("ART_UPSTREAM_API_KEY")  # the frozen model's address has a password instead
    monkeypatch.setenv("LANGFUSE_HOST", url)
    monkeypatch.setattr("art_langfuse.outbox.PATIENCE", 0.0)
    caplog.set_level(logging.DEBUG)
    for library in ("httpx", "httpx2", "httpcore", "openai", "LiteLLM", "asyncio", "urllib3", "langfuse"):
        logging.getLogger(library).setLevel(logging.WARNING)  # what these say below that is theirs, and off by default

    async def agent(task, address):
        """Asks the policy with keys in its headers, then a server of its own, which says its key back."""
        own = {"authorization": f"Bearer {keys['ANTHROPIC_API_KEY']}", "x-database": keys["MY_DATABASE_PASSWORD"]}
        body = {"model": "policy", "messages": [{"role": "user", "content": task}]}
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            for node in ("planner", "writer"):
                answer = await client.post(
                    f"{address.base_url}/chat/completions", json=body, headers=own | {"x-art-agent": node}
                )
                answer.raise_for_status()
            refused = await client.post(f"{url}/elsewhere", json={}, headers=own)
        if task == "fails":
            host = url.partition("//")[2]
            raise RuntimeError(f"http://me:{MARK}-password@{host} said {refused.json()['message']}\x1b]0;title\x07")
        return answer.json()["choices"][0]["message"]["content"]

    shown = io.StringIO()
    judge = Ruler("openai/judge", api_base=f"{url}/v1", api_key=keys["OPENAI_API_KEY"], retries=0)
    with vllm_like() as frozen, display.Display(console=Console(file=shown)) as progress:
        await art.train(
            agent, ["fails", "ends"], model="tiny", reward=judge, engine=FakeEngine(), learner=CountingLearner(), steps=1,
            group_size=2, run_dir=tmp_path / "run", progress=progress, trackers=["langfuse"],
            plugins=Plugins(art_langfuse, installed=False),
            frozen_model=frozen.url.replace("://", f"://me:{MARK}-password@"),
            train_nodes=["planner"], learner_args={"env": {"HF_TOKEN": keys["HF_TOKEN"]}},
        )  # fmt: skip
    assert base64.b64decode(frozen.keys[-1].removeprefix("Basic ")).decode() == f"me:{MARK}-password"
    sent = str(asked)
    pair = encoded(keys["LANGFUSE_PUBLIC_KEY"], keys["LANGFUSE_SECRET_KEY"])
    assert f"Basic {pair}" in sent
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "LANGFUSE_PUBLIC_KEY", "MY_DATABASE_PASSWORD"):
        assert keys[name] in sent, "or nothing is tested"
    said = [*pages(tmp_path / "run"), caplog.text, *capfd.readouterr(), shown.getvalue()]
    for key in (MARK, pair, encoded("me", f"{MARK}-password")):
        assert held(tmp_path, key) == [] and all(key not in it for it in said)
    assert "***" in "".join(said) and "refused" in said[0] + "".join(said), "what was said is there, without the keys"
    assert not any("\x1b" in it for it in said)


async def test_a_judge_that_refuses_the_key_says_so_without_it(keys, tmp_path):
    async def refuse(request: Request) -> JSONResponse:
        return JSONResponse({"error": {"message": f"wrong key {request.headers['authorization']}\x1b[2J"}}, 401)

    with serving(Route("/{path:path}", refuse, methods=["POST"])) as url:
        judge = Ruler("openai/judge", api_base=f"{url}/v1", api_key=f"{MARK}-given", retries=0)
        with pytest.raises(ConfigError, match="cannot be used") as told:
            await judge.compare([[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]])
    assert MARK not in str(told.value) and "wrong key Bearer ***" in str(told.value) and "\x1b" not in str(told.value)


LEAKS = (
    lambda sent: JSONResponse({"error": {"message": f"{sent} is wrong"}}, 401),
    lambda sent: PlainTextResponse(f"debug: {sent}"),
    # Where what is shown of it ends in the middle of the key.
    lambda sent: PlainTextResponse(f"{'x' * 180} {sent}"),
    lambda sent: PlainTextResponse(f"{'x' * 485} {sent}", 401),
    lambda sent: PlainTextResponse(f"{'x' * 1985} {sent}", 401),
    # What is JSON, and no completion.
    lambda sent: JSONResponse([sent]),
    lambda sent: JSONResponse({"choices": [5], "debug": sent}),
    lambda sent: JSONResponse({"choices": [{"logprobs": {"content": [{sent: sent}]}}]}),
)
"""Answers of a server that says back what it was sent."""


@pytest.mark.system
async def test_an_upstream_that_refuses_or_answers_nonsense_says_so_without_key_and_password(keys):
    answers = []

    async def answer(request: Request) -> JSONResponse:
        return answers.pop(0)(request.headers["authorization"])

    with serving(Route("/{path:path}", answer, methods=["POST"])) as url:
        for upstream in (
            HttpUpstream(f"{url}/v1", api_key=f"{MARK}-given-0123456789"),
            HttpUpstream(url.replace("://", f"://me:{MARK}-pw@") + "/v1"),
        ):
            answers += LEAKS
            for _ in LEAKS:
                with pytest.raises(UpstreamError) as told:
                    await upstream.chat({"messages": []})
                said = str(told.value)
                assert MARK[:4] not in said and encoded("me", f"{MARK}-pw")[:9] not in said
            await upstream.stop()
            assert upstream.base_url == f"{url}/v1"
    gone = HttpUpstream(f"http://me:{MARK}-pw@127.0.0.1:1/v1")
    with pytest.raises(UpstreamError, match="is the server running") as told:
        await gone.chat({"messages": []})
    await gone.stop()
    assert MARK not in str(told.value) and MARK not in repr(told.value.__cause__)
    with pytest.raises(ConfigError, match="remove the other") as told:
        HttpUpstream(f"http://me:{MARK}-pw@127.0.0.1:1/v1", api_key=f"{MARK}-given")
    assert MARK not in str(told.value)


@pytest.mark.parametrize("what", [connect, lambda url: TrainingClient("a", url)])
def test_a_servers_address_with_a_password_is_refused_without_saying_it(what):
    with pytest.raises(ConfigError, match="token=") as told:
        what(f"http://me:{MARK}@127.0.0.1:8000")
    assert MARK not in str(told.value)


def test_an_answer_that_is_no_completion_is_told_without_what_it_says():
    with pytest.raises(UpstreamError, match="'finish_reason' of a choice is of type list") as told:
        check_answer({"choices": [{"finish_reason": [f"Bearer {MARK}"]}]})
    assert MARK not in str(told.value)
    with pytest.raises(UpstreamError, match="'index' of a choice is -3"):
        check_answer({"choices": [{"index": -3}]})


def test_an_address_of_langfuse_that_is_none_is_not_shown(keys, monkeypatch):
    for host in (f"{MARK}-key", f"https://me:{MARK}@langfuse.example"):
        monkeypatch.setenv("LANGFUSE_HOST", host)
        with pytest.raises(ConfigError, match="LANGFUSE_HOST must be an address") as told:
            account()
        assert MARK not in str(told.value)


def test_keys_among_the_servers_options_are_refused_by_name(keys):
    with pytest.raises(ConfigError, match="engine_args can't contain hf-token, ssl-keyfile-password") as told:
        given = {"hf_token": MARK, "--ssl-keyfile-password": MARK, "max-num-batched-tokens": "8k"}
        options(str(TINY), TrainConfig(engine_args=given), cuda=False)
    assert MARK not in str(told.value)
