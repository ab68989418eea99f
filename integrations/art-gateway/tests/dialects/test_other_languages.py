"""Agents in other languages need a rollout's address and nothing else: programs of Node, and curl."""

import asyncio
import json
import re
import shutil
import signal
import sys

import pytest
from http_server import serving
from node_programs import WAYS, answer, output_of
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

import art_core as art
from art_core.testing import FakeEngine

PRINTED = {"structured": "task-001"}
"""Way -> what the programs print, if not the policy's last text."""


def in_vllms_way(answer):
    """Return a FakeEngine's answer, or a chunk of it, as vLLM sends it."""
    for choice in answer["choices"]:
        choice["logprobs"] = {"content": [{"logprob": value} for value in choice.pop("token_logprobs")]}
    return answer


@pytest.fixture
def upstream():
    """A server's address, and the engine that answers there."""
    engine = FakeEngine(answer)

    async def chat(request):
        body = await request.json()
        if body.get("stream"):
            chunks = engine.stream(body)
            return StreamingResponse(
                (f"data: {json.dumps(in_vllms_way(chunk))}\n\n" async for chunk in chunks),
                media_type="text/event-stream",
            )
        return JSONResponse(in_vllms_way(await engine.chat(body)))

    with serving(Route("/v1/chat/completions", chat, methods=["POST"])) as address:
        yield f"{address}/v1", engine


@pytest.mark.engines
async def test_programs_of_node_go_through_the_gateway_and_every_call_is_kept(upstream, tmp_path):
    url, engine = upstream
    code = "import typer; from art_gateway.command import gateway; typer.run(gateway)"
    options = ["--upstream", url, "--port", "0", "--run-dir", str(tmp_path)]
    gateway = await asyncio.create_subprocess_exec(sys.executable, "-c", code, *options, stderr=asyncio.subprocess.PIPE)
    address = re.search(r"http://127\.0\.0\.1:\d+", (await gateway.stderr.readline()).decode())[0]
    try:
        for folder, ways in WAYS.items():
            asked = [
                output_of(folder, "Please do task-001.", way, f"{address}/rollouts/{folder}-{way}/v1") for way in ways
            ]
            printed = await asyncio.gather(*asked)
            assert printed == [PRINTED.get(way, "answer to task-001") for way in ways]
    finally:
        gateway.send_signal(signal.SIGINT)
        said = (await gateway.communicate())[1].decode()
    assert gateway.returncode == 0, said
    trajectories = art.load_trajectories(tmp_path)
    assert {it.rollout_id for it in trajectories} == {f"{folder}-{way}" for folder in WAYS for way in WAYS[folder]}
    calls = [call for trajectory in trajectories for call in trajectory.calls]
    assert len(calls) == len(engine.requests)
    for call in calls:
        assert call.prompt_ids and len(call.sampled_ids) == len(call.logprobs) > 0
        assert call.finish_reason != "aborted"


async def output_of_curl(*arguments) -> str:
    process = await asyncio.create_subprocess_exec(
        "curl", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode() + out.decode()
    return out.decode()


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
    async with opened("Hello.") as desk:
        command = ["-sS", "--noproxy", "*", f"{desk.url}/{path}", "-H", "content-type: application/json"]
        assert shown in await output_of_curl(*command, "-d", json.dumps({"model": "m", **body}))
        streamed = await output_of_curl(*command, "-N", "-d", json.dumps({"model": "m", "stream": True, **body}))
        assert streamed.startswith(("data: ", "event: "))
        assert "Hel" in streamed and "lo." in streamed
        assert desk.all_recorded(2)
