"""Runs and evaluations at the address of a server that somebody else runs."""

import asyncio
import json

import pytest

import art_core as art
from art_core.errors import ConfigError
from art_core.testing import CountingLearner, FakeEngine
from art_core.types import Call


@pytest.fixture
async def address(fake):
    server = fake.engine(lora_rank=8)
    await server.start()
    yield server.base_url
    await server.stop()


async def agent(task, rollout):
    """Ask by hand: no plugin is needed for that."""
    host, port = rollout.base_url.removeprefix("http://").split("/")[0].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"messages": [{"role": "user", "content": task}]}).encode()
    path = rollout.base_url.split(port, 1)[1]
    head = f"POST {path}/chat/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: {len(body)}"
    writer.write(f"{head}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"]


def group():
    call = Call(prompt_ids=(5, 6, 7), sampled_ids=(8, 9, 10), logprobs=(-0.1,) * 3)
    return art.Group("t", tuple(art.Trajectory(task="t", calls=(call,), reward=reward) for reward in (0.0, 1.0)))


@pytest.mark.smoke
@pytest.mark.system
@pytest.mark.parametrize(("settings", "loaded"), [({"lora_rank": 0}, "/collective_rpc"), ({}, "/v1/load_lora_adapter")])
async def test_a_runs_weights_are_loaded_for_its_evaluation(fake, address, tmp_path, settings, loaded):
    settings = settings or {"lora_rank": 8}
    async with art.open_run(tmp_path / "trained", engine=FakeEngine(), learner="torch", **settings) as run:
        await run.learn([group()])
    report = await art.evaluate(
        agent, ["hi"], model=tmp_path / "trained", reward=lambda it: 1.0, engine=address, run_dir=tmp_path / "eval",
        progress=False,
    )  # fmt: skip
    assert len(fake.told(loaded)) == 1 and "checkpoints/step-000001" in json.dumps(fake.told(loaded))
    assert report.trajectories[0].calls[0].policy_version == 1


@pytest.mark.parametrize("settings", [{"lora_rank": 0}, {"lora_rank": 8, "frozen_model": "tiny"}])
async def test_one_server_cannot_be_the_trained_model_and_another_one_too(address, tmp_path, settings):
    with pytest.raises(ConfigError, match=r"engine='http://.*' is one server; pass frozen_model='http://HOST:PORT/v1'"):
        async with art.open_run(
            tmp_path / "run", engine=address, learner=CountingLearner(), train_nodes=["planner"], **settings
        ):
            pass
