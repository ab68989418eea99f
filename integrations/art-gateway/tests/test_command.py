"""``art gateway`` as a process: what it says, and that a signal loses nothing."""

import asyncio
import json
import re
import signal
import sys

import aiohttp
import pytest
from typer.testing import CliRunner

import art_core as art
from art_core.plugin_api import Plugins
from art_core.testing import ScriptedAgent

CODE = "import typer; from art_gateway.command import gateway; typer.run(gateway)"


async def started(upstream, folder, *options):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, "--upstream", upstream.url, "--port", "0", "--run-dir", str(folder), *options,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    line = (await process.stderr.readline()).decode()
    return process, line, re.search(r"http://127\.0\.0\.1:\d+", line)[0]


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_lets_the_calls_in_flight_end_and_loses_nothing(upstream, until, tmp_path, number):
    upstream.may_answer.clear()
    process, line, address = await started(upstream, tmp_path)
    assert upstream.url in line and str(tmp_path) in line and "curl http://127.0.0.1" in line

    async with aiohttp.ClientSession() as client:

        async def ask(rollout):
            body = {"messages": [{"role": "user", "content": "hello"}]}
            async with client.post(f"{address}/rollouts/{rollout}/v1/chat/completions", json=body) as response:
                return response.status, await response.json()

        asked = [asyncio.create_task(ask(f"r{number}")) for number in range(8)]
        await until(lambda: upstream.open == 8)
        process.send_signal(number)
        assert b"waiting for 8 calls" in await process.stderr.readline()
        upstream.may_answer.set()
        assert {status for status, _ in await asyncio.gather(*asked)} == {200}
    said = (await process.communicate())[1].decode()
    assert process.returncode == 0, said
    assert "stopped; recorded 8 calls of 8 rollouts" in said
    assert len(art.load_trajectories(tmp_path)) == 8


@pytest.mark.system
async def test_a_second_signal_ends_what_still_runs_and_keeps_it_as_aborted(upstream, until, tmp_path):
    upstream.delay = 0.05
    process, _, address = await started(upstream, tmp_path)
    async with aiohttp.ClientSession() as client:
        body = {"stream": True, "messages": [{"role": "user", "content": "x" * 10_000}]}
        asking = asyncio.create_task(client.post(f"{address}/rollouts/r1/v1/chat/completions", json=body))
        await until(lambda: upstream.open == 1)
        await asyncio.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert b"waiting for 1 calls" in await process.stderr.readline()
        process.send_signal(signal.SIGINT)
        said = (await process.communicate())[1].decode()
        await asyncio.gather(asking, return_exceptions=True)
    assert process.returncode == 0, said
    [trajectory] = art.load_trajectories(tmp_path)
    assert trajectory.calls[0].finish_reason == "aborted"


@pytest.mark.system
@pytest.mark.parametrize("stream", [False, True])
async def test_a_signal_while_paused_tells_the_calls_that_wait_to_come_back(upstream, until, tmp_path, stream):
    process, _, address = await started(upstream, tmp_path)
    async with aiohttp.ClientSession() as client:

        async def ask():
            body = {"messages": [{"role": "user", "content": "hello"}], "stream": stream}
            async with client.post(f"{address}/rollouts/r1/v1/chat/completions", json=body) as response:
                return response.status, (await response.json())["error"]["code"], response.headers.get("retry-after")

        async with client.post(f"{address}/pause") as response:
            assert response.status == 200
        asked = [asyncio.create_task(ask()) for _ in range(3)]
        waiting = 0
        while waiting < 3:
            async with client.get(f"{address}/status") as response:
                waiting = (await response.json())["waiting"]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.gather(*asked) == [(503, "stopping", "5")] * 3
    await process.communicate()
    assert process.returncode == 0
    assert not upstream.requests


@pytest.mark.smoke
@pytest.mark.system
async def test_a_gateway_that_is_killed_keeps_what_it_had_answered(upstream, tmp_path):
    process, _, address = await started(upstream, tmp_path)
    async with aiohttp.ClientSession() as client:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        async with client.post(f"{address}/rollouts/r1/v1/chat/completions", json=body) as response:
            assert response.status == 200
    await asyncio.sleep(0.3)
    process.kill()
    await process.communicate()
    [trajectory] = art.load_trajectories(tmp_path)
    assert bytes(trajectory.calls[0].sampled_ids) == b"hello"


@pytest.mark.system
async def test_better_prompts_replace_the_agents_own_upstream_and_in_the_recording(upstream, tmp_path):
    change = {"component": "agent: system prompt", "find": "Be brief.", "replace": "Answer in one word."}
    (tmp_path / "prompts.json").write_text(json.dumps({"texts": [change]}))
    process, _, address = await started(upstream, tmp_path / "run", "--prompts", str(tmp_path / "prompts.json"))
    messages = [{"role": "system", "content": "Be brief. Today is Monday."}, {"role": "user", "content": "hello"}]
    async with aiohttp.ClientSession() as client:
        for path, body in (
            ("chat/completions", {"messages": messages}),
            ("messages", {"system": messages[0]["content"], "messages": messages[1:], "max_tokens": 9, "model": "m"}),
        ):
            async with client.post(f"{address}/rollouts/r1/v1/{path}", json=body) as response:
                assert response.status == 200, await response.text()
    process.send_signal(signal.SIGINT)
    await process.communicate()
    [trajectory] = art.load_trajectories(tmp_path / "run")
    shown = [request["messages"][0]["content"] for request in upstream.requests]
    shown += [call.request["messages"][0]["content"] for call in trajectory.calls]
    assert shown == ["Answer in one word. Today is Monday."] * 4


@pytest.mark.engines
async def test_without_a_server_the_embedded_engine_answers(tmp_path):
    pytest.importorskip("torch")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, "--model", "tiny", "--port", "0", "--run-dir", str(tmp_path),
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    line = (await process.stderr.readline()).decode()
    address = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
    assert "the embedded engine with tiny" in line
    async with aiohttp.ClientSession() as client:
        async with client.get(f"{address}/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "tiny"
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": stream}
            async with client.post(f"{address}/rollouts/r1/v1/chat/completions", json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()
    process.send_signal(signal.SIGINT)
    said = (await process.communicate())[1].decode()
    assert process.returncode == 0, said
    [trajectory] = art.load_trajectories(tmp_path)
    assert [0 < len(call.sampled_ids) <= 4 for call in trajectory.calls] == [True, True]


@pytest.mark.engines
@pytest.mark.parametrize("lora_rank", [0, 4])
async def test_the_last_checkpoint_of_a_run_folder_is_served(tmp_path, lora_rank):
    pytest.importorskip("torch")
    from art_gateway.local import LocalUpstream

    await art.train(
        ScriptedAgent(), ["a"], model="tiny", reward=lambda run: float(int(run.rollout_id[:8], 16)), steps=1, tasks_per_step=1,
        group_size=2, learning_rate=1e-2, warmup_steps=0, lora_rank=lora_rank, run_dir=tmp_path / "run", progress=False,
    )  # fmt: skip
    answers = []
    for model in ("tiny", str(tmp_path / "run")):
        upstream = LocalUpstream(model, Plugins())
        await upstream.start()
        answers.append(
            await upstream.chat({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": True})
        )
        await upstream.stop()
    assert [answer["policy_version"] for answer in answers] == [0, 1]
    before, after = (answer["choices"][0]["logprobs"]["content"][0]["logprob"] for answer in answers)
    assert before != after


def test_the_help_has_an_example_and_the_plugin_registers_the_command():
    import typer

    import art_gateway

    app = typer.Typer(rich_markup_mode="markdown")

    @app.command()
    def other() -> None:
        """Makes the app one of several commands."""

    art_gateway.register_commands(app)
    said = CliRunner().invoke(app, ["gateway", "--help"], env={"COLUMNS": "200"}).output
    assert "--upstream" in said
    assert "art gateway --upstream http://127.0.0.1:8000/v1" in said


def test_an_upstream_that_is_no_address_is_refused():
    import typer

    from art_gateway.command import gateway

    app = typer.Typer()
    app.command()(gateway)
    found = CliRunner().invoke(app, ["--upstream", "localhost:8000"])
    assert found.exit_code == 2
    nothing = CliRunner().invoke(app, ["--port", "0"])
    assert nothing.exit_code == 2
    assert "--model tiny" in " ".join(nothing.output.split())
