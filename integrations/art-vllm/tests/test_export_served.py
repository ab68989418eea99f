"""The command lines that ``art export`` gives, with vLLM itself: what it serves is what was trained."""

import asyncio
import os
import shlex
import socket
import subprocess
import time

import httpx
import pytest
import torch

import art_core as art
from art_core.learner.replay import load_weights
from art_core.testing import FakeEngine, ScriptedAgent
from art_embedded import TINY
from art_vllm import environment
from art_vllm.export import export

IDS = [1, 5, 9, 200, 31, 7, 7, 90, 12, 400, 3]
SECONDS = 300
"""That a start may take."""


async def train(run_dir):
    rewards = iter(range(100))
    settings = {"learning_rate": 5e-3, "warmup_steps": 0, "learner": "torch", "lora_rank": 4, "engine": FakeEngine()}
    async with art.open_run(run_dir, **settings) as run:
        groups = await run.collect(ScriptedAgent(), ["one"], group_size=4)
        await run.learn(await run.score(groups, lambda t: float(next(rewards) % 2)))


def served(command, name, log):
    """Run the command until it has told the logprobs of IDS, and return them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    _, *arguments = shlex.split(command)
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "256"]
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # As art's own servers on a CPU, which start sooner so.
    variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    with log.open("w") as file:
        server = subprocess.Popen(
            [environment.find().python, *arguments], env=variables, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/health", server, log)
            body = {"model": name, "prompt": IDS, "max_tokens": 1, "prompt_logprobs": 0}
            with httpx.Client(trust_env=False, timeout=120) as client:
                answer = client.post(f"http://127.0.0.1:{port}/v1/completions", json=body).raise_for_status().json()
        finally:
            server.terminate()
            server.wait(60)
    rows = answer["choices"][0]["prompt_logprobs"][1:]
    return torch.tensor([row[str(token)]["logprob"] for row, token in zip(rows, IDS[1:], strict=True)])


def wait_for(url, server, log):
    until = time.monotonic() + SECONDS
    with httpx.Client(trust_env=False) as client:
        while time.monotonic() < until:
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                if client.get(url).is_success:
                    return
            except httpx.TransportError:
                time.sleep(1)
    raise AssertionError(f"not healthy after {SECONDS} s: {log.read_text()[-3000:]}")


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_vllm_serves_the_merged_model_and_the_adapter_as_they_were_trained(tmp_path):
    asyncio.run(train(tmp_path / "run"))
    exported = export(tmp_path / "run", tmp_path / "out")
    model = load_weights(str(TINY), tmp_path / "run" / "checkpoints" / "step-000001")
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([IDS])).logits[0], -1)
        with model.disable_adapter():
            start = torch.log_softmax(model(torch.tensor([IDS])).logits[0], -1)
    places = torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])
    assert (start - logprobs)[places].abs().max() > 0.01
    for way, command in exported.commands.items():
        found = served(command, "run", tmp_path / f"{way}.log")
        assert (found - logprobs[places]).abs().max() < 1e-3, way
