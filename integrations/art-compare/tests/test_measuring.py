"""Sides without an evaluation are measured before they are compared."""

import json
from pathlib import Path

from http_server import serving_app
from typer.testing import CliRunner
from vllm_like import VllmLike

from art_cli.main import command
from art_core.testing import FakeEngine
from art_core.testing.provider import PlainProvider

APP = """
import openai

client = openai.OpenAI()
tasks = ["task 1", "task 2", "task 3"]

def agent(task):
    asked = [{"role": "user", "content": task}]
    return client.chat.completions.create(model="m", messages=asked, max_tokens=4).choices[0].message.content

def reward(trajectory):
    return float("2" in trajectory.task)
"""


def art_compare(*arguments):
    return CliRunner().invoke(command(), ["compare", *map(str, arguments)], env={"COLUMNS": "200"})


def test_live_and_a_model_at_an_address_are_measured_and_a_folder_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-own")
    Path("app.py").write_text(APP)
    how = ["--agent", "app.py:agent", "--tasks", "app.py:tasks", "--reward", "app.py:reward"]
    provider, server = PlainProvider(FakeEngine("yes"), {}), VllmLike()
    with provider.running() as running, serving_app(server.app) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", running.base_url)
        done = art_compare(f"tiny@{url}/v1", "live", *how, "--json")
        assert done.exit_code == 0, done.output
        assert (len(provider.requests), len(server.requests)) == (3, 3)
        again = art_compare("live=" + json.loads(done.stdout)["sides"][1]["run_dir"], f"other=tiny@{url}/v1", *how)
        assert again.exit_code == 0 and (len(provider.requests), len(server.requests)) == (3, 6), again.output
    assert [side["name"] for side in json.loads(done.stdout)["sides"]] == ["tiny", "live"]


def test_without_an_agent_a_side_that_is_no_folder_is_refused_with_what_to_do(tmp_path):
    for side in ("live", "http://127.0.0.1:9/v1"):
        refused = art_compare(side, tmp_path)
        assert refused.exit_code == 2 and f"{side} is not a run folder; to measure it now, pass --agent" in " ".join(
            refused.output.replace("│", " ").split()
        )
    nameless = art_compare("http://127.0.0.1:9/v1", tmp_path, "--agent", "a:b", "--tasks", "t.jsonl")
    assert "name one: MODEL@http://127.0.0.1:9/v1" in str(nameless.exception)
    assert "pass --agent and --tasks together" in art_compare("a", "b", "--tasks", "t.jsonl").output
