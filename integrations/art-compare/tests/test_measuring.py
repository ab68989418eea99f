"""Sides without an evaluation are measured before they are compared."""

import json
from pathlib import Path

import pytest
from http_server import serving_app
from typer.testing import CliRunner
from vllm_like import VllmLike

import art_core as art
from art_cli.main import command
from art_core.testing import FakeEngine, ScriptedAgent
from art_core.testing.provider import PlainProvider

APP = """
import openai

client = openai.OpenAI()
times = 0

def tasks():
    global times
    times += 1  # tasks that differ from one load to the next, as if they were drawn
    return [f"task {number} of {times}" for number in range(3)] + ["task 1 of all"]

def agent(task):
    asked = [{"role": "user", "content": task}]
    return client.chat.completions.create(model="m", messages=asked, max_tokens=4).choices[0].message.content

def reward(trajectory):
    return float("2" in trajectory.task)
"""
HOW = ["--agent", "app.py:agent", "--tasks", "app.py:tasks", "--reward", "app.py:reward"]


def art_compare(*arguments):
    return CliRunner().invoke(command(), ["compare", *map(str, arguments)], env={"COLUMNS": "300"})


def refusal(*arguments):
    refused = art_compare(*arguments)
    assert refused.exit_code == 2, refused.output
    return " ".join(refused.output.replace("│", " ").split())


@pytest.fixture
def servers(tmp_path, monkeypatch):
    """The agent's own provider, and a server of a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
    Path("app.py").write_text(APP)
    provider, server = PlainProvider(FakeEngine("yes"), {}), VllmLike()
    with provider.running() as running, serving_app(server.app) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", running.base_url)
        yield provider, server, f"tiny@{url}/v1"


def evaluation(folder):
    """Record an evaluation of one of the tasks."""
    settings = {"engine": FakeEngine(), "reward": lambda trajectory: 1.0, "run_dir": folder, "progress": False}
    art.evaluate_sync(ScriptedAgent(max_tokens=8), ["task 1 of all"], model="tiny", **settings)
    return folder


def test_live_and_a_model_at_an_address_are_measured_on_the_same_tasks_and_a_folder_is_read(servers, tmp_path):
    provider, server, at_address = servers
    done = art_compare(at_address, "live", f"old={evaluation(tmp_path / 'old')}", *HOW, "--json")
    assert done.exit_code == 0, done.output
    assert (len(provider.requests), len(server.requests)) == (4, 4)
    found = json.loads(done.stdout)
    assert [(side["name"], side["tasks"]) for side in found["sides"]] == [("tiny", 4), ("live", 4), ("old", 1)]
    again = art_compare(f"live={found['sides'][1]['run_dir']}", f"tiny={found['sides'][0]['run_dir']}")
    assert again.exit_code == 0 and "4 tasks that all sides have" in again.output


def test_the_providers_key_goes_to_the_provider_alone(servers):
    provider, server, at_address = servers
    assert art_compare(at_address, "live", *HOW).exit_code == 0
    assert {dict(request.headers)["authorization"] for request in provider.requests} == {"Bearer sk-own"}
    assert not any("sk-own" in str(key) for key in server.keys) and len(server.keys) == 4


def test_what_cannot_be_compared_is_refused_before_anything_is_measured(servers, tmp_path, monkeypatch):
    provider, server, at_address = servers
    old = evaluation(tmp_path / "old")
    assert "two sides are called 'tiny'" in refusal(at_address, f"{at_address}/other", *HOW)
    assert "has no evaluation 'nope'" in refusal("live", f"{old}@nope", *HOW)
    assert "nothing to compare live with" in refusal("live", *HOW)
    assert "runs/typo does not exist" in refusal("live", "runs/typo", *HOW)
    assert "at its own temperature; drop --temperature" in refusal("live", old, *HOW, "--temperature", "0")
    assert "no side is called 'mine'" in refusal("live", old, *HOW, "--price", "mine=1/2")
    assert "mine" in refusal("live", old, *HOW, "--gate", "success >= mine")
    assert "name one: MODEL@ADDRESS" in refusal("http://127.0.0.1:9/v1", old, *HOW)
    assert "pass --agent and --tasks together" in refusal("live", old, "--tasks", "t.jsonl")
    monkeypatch.setenv("ART_UPSTREAM_API_KEY", "sk-server")
    assert "would be sent to 2 addresses" in refusal(at_address, "b=tiny@http://127.0.0.1:9/v1", *HOW)
    assert not provider.requests and not server.requests


def test_without_an_agent_a_side_that_is_no_folder_is_refused_with_what_to_do(tmp_path):
    for side in ("live", "http://127.0.0.1:9/v1"):
        assert f"{side} is not a run folder; to evaluate it now, pass --agent" in refusal(side, tmp_path)
