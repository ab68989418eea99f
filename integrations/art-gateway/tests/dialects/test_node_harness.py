"""Agents in other languages need a rollout's address and nothing else: Node's OpenAI package, and curl."""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

import art_core as art

HARNESS = Path(__file__).parents[4] / "examples" / "node_harness"


def answer(request):
    """Call the tool where there is one and the user has just spoken, else say hello."""
    if request.get("tools") and request["messages"][-1]["role"] == "user":
        function = {"name": "weather", "arguments": '{"city": "Paris"}'}
        return {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    return "Hello."


async def output_of(*command, **options) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, **options
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode() + out.decode()
    return out.decode()


@pytest.fixture
async def harness(tmp_path):
    """The folder of a copy of the harness, with what it needs installed."""
    if shutil.which("npm") is None:
        pytest.skip("node and npm are not installed, so there is nothing to run the harness with")
    for file in HARNESS.glob("*.js*"):
        shutil.copy(file, tmp_path)
    await output_of("npm", "ci", "--no-audit", "--no-fund", cwd=tmp_path)
    return tmp_path


@pytest.mark.engines
async def test_a_node_agent_is_answered_and_recorded(opened, harness):
    async with opened(answer) as desk:
        environment = {**os.environ, "OPENAI_BASE_URL": desk.url, "OPENAI_API_KEY": "none"}
        lines = (await output_of("node", "agent.js", "Weather?", cwd=harness, env=environment)).splitlines()
        called = ['{"city": "Paris"}']
        assert [json.loads(line) for line in lines] == [
            {"step": "chat", "text": "Hello."},
            {"step": "chat stream", "text": "Hello."},
            {"step": "chat tools", "called": called, "text": "Hello."},
            {"step": "responses", "text": "Hello."},
            {"step": "responses stream with tools", "called": called, "text": "Hello."},
        ]
        assert desk.all_recorded(7)
        by_chat, by_responses = desk.engine.requests[3]["messages"], desk.engine.requests[6]["messages"]
        assert by_chat[-1] == by_responses[-1]
        assert by_responses[-1] == {"role": "tool", "tool_call_id": "call_1", "content": "sunny in Paris"}


@pytest.mark.engines
async def test_a_node_agent_goes_through_the_gateway_and_every_call_is_kept(harness):
    pytest.importorskip("torch")
    code = "import typer; from art_gateway.command import gateway; typer.run(gateway)"
    options = ["--model", "tiny", "--port", "0", "--run-dir", str(harness / "run")]
    gateway = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *options, stderr=asyncio.subprocess.PIPE)
    address = re.search(r"http://127\.0\.0\.1:\d+", (await gateway.stderr.readline()).decode())[0]
    environment = {**os.environ, "OPENAI_BASE_URL": f"{address}/rollouts/paris/v1", "OPENAI_API_KEY": "none"}
    try:
        lines = (await output_of("node", "agent.js", "Weather?", cwd=harness, env=environment)).splitlines()
    finally:
        gateway.send_signal(signal.SIGINT)
        said = (await gateway.communicate())[1].decode()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == 5 and gateway.returncode == 0, said
    [trajectory] = art.load_trajectories(harness / "run")
    # One more for every tool that the model happens to call.
    assert trajectory.rollout_id == "paris" and len(trajectory.calls) >= len(steps)
    assert all(len(call.sampled_ids) == len(call.logprobs) > 0 for call in trajectory.calls)


@pytest.mark.parametrize(
    ("path", "body", "shown"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, '"content":"Hello."'),
        ("completions", {"prompt": "Hi"}, '"text":"Hello."'),
        ("responses", {"input": "Hi"}, '"text":"Hello."'),
        ("messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}, '"text":"Hello."'),
    ],
)
@pytest.mark.system
async def test_curl_is_answered_and_recorded(opened, path, body, shown):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    async with opened(answer) as desk:
        command = ["curl", "-sS", "--noproxy", "*", f"{desk.url}/{path}", "-H", "content-type: application/json"]
        assert shown in await output_of(*command, "-d", json.dumps({"model": "m", **body}))
        streamed = await output_of(*command, "-N", "-d", json.dumps({"model": "m", "stream": True, **body}))
        assert streamed.startswith(("data: ", "event: "))
        assert "Hel" in streamed and "lo." in streamed
        assert desk.all_recorded(2)
