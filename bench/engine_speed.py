"""Tokens per second, and per CPU second, of the embedded engine and of transformers' generate, on one model.

    python -m bench.engine_speed [MODEL] [--clients 1 --clients 64] [--seconds 4] [--tokens 60] [--turns 1]

Every client sends one request after the other, with the same system prompt, a question of its own, and at most ``--tokens``
sampled. With ``--turns`` above 1 a client continues its conversation, as agents do. generate() gets the same prompts as one
batch and computes each in full. The bound is what the matrix products of one decoding step alone would allow.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import nullcontext
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from art_core.config import TrainConfig, model_folder
from art_core.learner.sizes import SMALL_MODEL
from art_core.runtime.cpu import onednn_products
from art_embedded.engine import EmbeddedEngine

SYSTEM = "You answer questions about a mailbox. " * 4


def conversation(client: int, turn: int) -> list[dict[str, str]]:
    question = f"Question {client}.{turn}: when does the project with number {client * 37 % 91} end?"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


async def measure_engine(
    engine: EmbeddedEngine, clients: int, seconds: float, tokens: int, turns: int
) -> tuple[float, str]:
    end = time.perf_counter() + seconds
    sampled = requests = prompts = cached = 0

    async def client(number: int) -> None:
        nonlocal sampled, requests, prompts, cached
        turn = 0
        while time.perf_counter() < end:
            messages = conversation(number, turn)
            for _ in range(turns):
                answer = await engine.chat({"messages": messages, "max_tokens": tokens})
                usage = answer["usage"]
                sampled += usage["completion_tokens"]
                prompts += usage["prompt_tokens"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]
                requests += 1
                messages = [*messages, answer["choices"][0]["message"], {"role": "user", "content": "And the next?"}]
            turn += 1

    start, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*[client(number) for number in range(clients)])
    elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu
    return sampled / elapsed, (
        f"engine   {clients:3} clients: {sampled / elapsed:6.0f} tokens/s, {sampled / cpu:6.0f} per CPU second, "
        f"{requests / elapsed:5.1f} requests/s, {sampled / requests:.0f} sampled and {prompts / requests:.0f} prompt "
        f"tokens each, {cached / prompts:.0%} cached"
    )


@torch.inference_mode()
def measure_generate(folder: str, clients: int, tokens: int) -> tuple[float, str]:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    batch = tokenizer.apply_chat_template(
        [conversation(number, 0) for number in range(clients)],
        add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True,
    )  # fmt: skip
    start, cpu = time.perf_counter(), time.process_time()
    output = model.generate(**batch, do_sample=True, max_new_tokens=tokens, top_k=0, top_p=1.0)
    elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu
    new = output[:, batch["input_ids"].shape[1] :]
    sampled = int((new != tokenizer.pad_token_id).sum())
    return sampled / elapsed, (
        f"generate {clients:3} rows:    {sampled / elapsed:6.0f} tokens/s, {sampled / cpu:6.0f} per CPU second"
    )


@torch.inference_mode()
def bound(folder: str, clients: int) -> float:
    """Return the tokens per second that the products of one decoding step with all linear layers alone allow."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = [torch.randn(clients, layer.in_features) for layer in layers]
    times = []
    with onednn_products() if model.num_parameters() >= SMALL_MODEL else nullcontext():
        for _ in range(10):
            start = time.perf_counter()
            for layer, rows in zip(layers, inputs, strict=True):
                layer(rows)
            times.append(time.perf_counter() - start)
    return clients / statistics.median(times)


def main(
    model: Annotated[str, typer.Argument()] = "tiny",
    clients: Annotated[list[int] | None, typer.Option(help="Requests at a time; default: 1, 8, 32 and 64.")] = None,
    seconds: float = 4,
    tokens: int = 60,
    turns: int = 1,
) -> None:
    folder = model_folder(model)

    counts = clients or [1, 8, 32, 64]

    async def run() -> list[tuple[float, str]]:
        engine = EmbeddedEngine(folder, TrainConfig(model=model))
        started = time.perf_counter()
        await engine.start()
        print(f"{folder}: started in {time.perf_counter() - started:.1f} s, {torch.get_num_threads()} threads")
        measured = []
        for count in counts:
            await measure_engine(engine, count, 0.3, tokens, turns)
            measured.append(await measure_engine(engine, count, seconds, tokens, turns))
        await engine.stop()  # its settings for products would hold for generate() too
        return measured

    for count, (ours, line) in zip(counts, asyncio.run(run()), strict=True):
        measure_generate(folder, count, tokens)
        theirs, other = measure_generate(folder, count, tokens)
        print(f"{line}\n{other}\nengine / generate: {ours / theirs:.2f}; bound: {bound(folder, count):.0f} tokens/s")


if __name__ == "__main__":
    typer.run(main)
