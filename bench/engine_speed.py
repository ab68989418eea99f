"""Tokens per second, and per CPU second, of the embedded engine and of transformers' generate, on one model.

    python bench/engine_speed.py [MODEL] [--seconds 4] [--tokens 60] [--turns 1]

Every client sends one request after the other, with the same system prompt, a question of its own, and at most ``--tokens``
sampled. With ``--turns`` above 1 a client continues its conversation, as agents do. generate() gets the same prompts as one
batch and computes each in full.
"""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from art_core.config import TrainConfig, model_folder
from art_embedded.engine import EmbeddedEngine

SYSTEM = "You answer questions about a mailbox. " * 4


def conversation(client: int, turn: int) -> list[dict[str, str]]:
    question = f"Question {client}.{turn}: when does the project with number {client * 37 % 91} end?"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


async def measure_engine(engine: EmbeddedEngine, clients: int, seconds: float, tokens: int, turns: int) -> str:
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
    return (
        f"engine   {clients:3} clients: {sampled / elapsed:6.0f} tokens/s, {sampled / cpu:6.0f} per CPU second, "
        f"{requests / elapsed:5.1f} requests/s, {sampled / requests:.0f} sampled and {prompts / requests:.0f} prompt "
        f"tokens each, {cached / prompts:.0%} cached"
    )


@torch.inference_mode()
def measure_generate(folder: str, clients: int, tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    batch = tokenizer.apply_chat_template(
        [conversation(number, 0) for number in range(clients)],
        add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True,
    )  # fmt: skip
    start, cpu = time.perf_counter(), time.process_time()
    output = model.generate(**batch, do_sample=True, max_new_tokens=tokens, top_k=0, top_p=1.0)
    elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu
    new = output[:, batch["input_ids"].shape[1] :]
    sampled = int((new != tokenizer.pad_token_id).sum())
    return f"generate {clients:3} rows:    {sampled / elapsed:6.0f} tokens/s, {sampled / cpu:6.0f} per CPU second"


def main(
    model: Annotated[str, typer.Argument()] = "tiny", seconds: float = 4, tokens: int = 60, turns: int = 1
) -> None:
    folder = model_folder(model)

    async def run() -> None:
        engine = EmbeddedEngine(folder, TrainConfig(model=model))
        started = time.perf_counter()
        await engine.start()
        print(f"{folder}: started in {time.perf_counter() - started:.1f} s, {torch.get_num_threads()} threads")
        for clients in (1, 8, 32, 64):
            await measure_engine(engine, clients, 0.3, tokens, turns)
            print(await measure_engine(engine, clients, seconds, tokens, turns))
        await engine.stop()

    asyncio.run(run())
    for clients in (1, 8, 32, 64):
        measure_generate(folder, clients, tokens)
        print(measure_generate(folder, clients, tokens))


if __name__ == "__main__":
    typer.run(main)
