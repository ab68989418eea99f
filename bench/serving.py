"""Tokens per second of the embedded engine and of vLLM's server on the same model, over HTTP, in one run.

    python -m bench.serving [MODEL] [--seconds 6] [--rounds 5] [--tokens 60] [--vllm http://127.0.0.1:8000/v1]

Without ``--vllm``, art-vllm starts a server. Sides are measured in turns, and the medians of the rounds are printed. Each client
sends one chat request after the other, with the same system prompt and a question of its own. The embedded engine answers behind
art's proxy, as for agents, which records every call on disk; vLLM answers at its own address, and again behind that proxy. Every
answer's logprobs are compared with those of a plain forward pass of transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedModel

from art_core.capture import HttpUpstream
from art_core.config import TrainConfig, model_folder
from art_core.serving import ServingProxy
from art_core.store import Store
from art_core.types import Call, JsonDict
from art_embedded.engine import EmbeddedEngine
from bench.engine_speed import conversation
from bench.tables import table

CLIENTS = (1, 8, 32, 64)
COMPARED = 64
"""Answers per side whose logprobs are compared."""


@dataclass
class Side:
    name: str
    urls: list[str]
    """One for each client."""
    model: str
    extra: JsonDict = field(default_factory=dict)
    """Added to every request's body."""
    rates: dict[int, list[float]] = field(default_factory=dict)
    """Tokens per second, by clients."""
    calls: list[Call] = field(default_factory=list)


async def load(side: Side, clients: int, seconds: float, tokens: int) -> float:
    """Return the sampled tokens per second."""
    sampled, end = 0, time.perf_counter() + seconds

    async def client(number: int) -> None:
        nonlocal sampled
        turn = 0
        while time.perf_counter() < end:
            body = {
                "model": side.model,
                "messages": conversation(number, turn),
                "max_tokens": tokens,
                "temperature": 1.0,
            }
            async with session.post(f"{side.urls[number]}/chat/completions", json={**body, **side.extra}) as response:
                if response.status != 200:
                    raise RuntimeError(f"{side.name} answered {response.status}: {await response.text()}")
                answer = await response.json()
            sampled += answer["usage"]["completion_tokens"]
            if side.extra and len(side.calls) < COMPARED:
                side.calls.append(_call(answer))
            turn += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), trust_env=False) as session:
        started = time.perf_counter()
        await asyncio.gather(*map(client, range(clients)))
    return sampled / (time.perf_counter() - started)


def _call(answer: JsonDict) -> Call:
    choice = answer["choices"][0]
    logprobs = tuple(token["logprob"] for token in choice["logprobs"]["content"])
    return Call(prompt_ids=tuple(answer["prompt_token_ids"]), sampled_ids=tuple(choice["token_ids"]), logprobs=logprobs)


@torch.inference_mode()
def largest_difference(model: PreTrainedModel, calls: list[Call]) -> float:
    """Return the largest difference of a logprob from a plain forward pass, in nats."""
    worst = 0.0
    for call in calls:
        ids = torch.tensor([[*call.prompt_ids, *call.sampled_ids]])
        logprobs = model(ids).logits[0].log_softmax(-1)
        first = len(call.prompt_ids)
        recomputed = logprobs[torch.arange(first - 1, ids.shape[1] - 1), ids[0, first:]]
        worst = max(worst, float((recomputed - torch.tensor(call.logprobs)).abs().max()))
    return worst


@contextlib.asynccontextmanager
async def behind_proxy(name: str, engine: Any, folder: Path, model: str = "policy") -> AsyncIterator[Side]:
    """Start the proxy with the engine that ``engine`` makes, and yield a side with an address per client."""
    file = folder / f"{name}.sqlite"
    async with await ServingProxy.start(engine, functools.partial(Store, file)) as opened:
        ids = [f"{name}-{number}" for number in range(max(CLIENTS))]
        with Store(file) as store:
            for rollout_id in ids:
                store.add_rollout(rollout_id, task="bench")
            side = Side(name, [await opened.open(rollout_id) for rollout_id in ids], model)
            yield side
            for rollout_id in ids:
                await opened.close(rollout_id)
            side.calls = [call for rollout_id in ids for call in store.calls(rollout_id)][-COMPARED:]


@contextlib.asynccontextmanager
async def vllm(folder: str, config: TrainConfig, address: str | None, log: Path) -> AsyncIterator[tuple[str, str]]:
    """Yield the address of a vLLM server and the name of its model."""
    if address is not None:
        upstream = HttpUpstream(address)
        name = (await upstream.models())["data"][0]["id"]
        await upstream.stop()
        yield address, name
        return
    from art_vllm import VllmEngine

    engine = VllmEngine(folder, config)
    engine.begin(log)
    await engine.start()
    try:
        yield engine.base_url, "policy@0"
    finally:
        await engine.stop()


async def measure(model: str, address: str | None, seconds: float, rounds: int, tokens: int) -> list[Side]:
    folder = model_folder(model)
    config = TrainConfig(model=model)
    scratch = Path(tempfile.mkdtemp(prefix="bench-serving-"))
    async with contextlib.AsyncExitStack() as stack:
        url, name = await stack.enter_async_context(vllm(folder, config, address, scratch))
        embedded = functools.partial(EmbeddedEngine, folder, config)
        ours = await stack.enter_async_context(behind_proxy("embedded", embedded, scratch))
        behind = functools.partial(HttpUpstream, url, name)
        same = await stack.enter_async_context(behind_proxy("vLLM behind art's proxy", behind, scratch))
        direct = Side("vLLM", [url] * max(CLIENTS), name, {"return_token_ids": True, "logprobs": True})
        sides = [ours, direct, same]
        for number in range(rounds + 1):
            for clients in CLIENTS:
                for side in sides if number % 2 else reversed(sides):
                    rate = await load(side, clients, seconds if number else 1.0, tokens)
                    if number:  # the first warms up
                        side.rates.setdefault(clients, []).append(rate)
    return sides


def main(
    model: Annotated[str, typer.Argument()] = "tiny",
    seconds: float = 6,
    rounds: int = 5,
    tokens: int = 60,
    vllm: Annotated[str | None, typer.Option(help="Address of a running vLLM server.")] = None,
) -> None:
    sides = asyncio.run(measure(model, vllm, seconds, rounds, tokens))
    plain = AutoModelForCausalLM.from_pretrained(model_folder(model), dtype=torch.float32).eval()
    medians = {side.name: {n: statistics.median(rates) for n, rates in side.rates.items()} for side in sides}
    rows = [[side.name, *medians[side.name].values(), f"{largest_difference(plain, side.calls):.1e}"] for side in sides]
    ratios = [medians["embedded"][n] / medians["vLLM"][n] for n in CLIENTS]
    rows.append(["embedded / vLLM", *(f"{ratio:.2f}" for ratio in ratios), ""])
    print(table(["tokens/s", *(f"{n} at a time" for n in CLIENTS), "logprobs off by"], rows))


if __name__ == "__main__":
    typer.run(main)
