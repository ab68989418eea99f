"""Steps without end with a model that is learnt and served: how much memory the trainer and the engine's process hold after each.

    python -m tests.soak_learner --steps 40

Prompts, answers and batches have random sizes, so that freed blocks do not fit the next ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil
import torch
import transformers

import art_core as art
from art_embedded import TINY

WORDS = ["inbox", "message", "Rome", "weather", "answer", "today", "seven", "from", "the", "and"]


@dataclass(frozen=True)
class Held:
    """Resident memory after a step, in MiB."""

    tokens: int
    """Of the step."""
    trainer: int
    engine: int


def save_model(folder: Path) -> str:
    """Write a model of 29 million random weights with the tokenizer of ``tiny``; return its folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY, model_max_length=2048)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=512, intermediate_size=1408, num_hidden_layers=10, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None, pad_token_id=0,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


async def agent(task: tuple[str, int], address: art.types.RolloutAddress) -> None:
    prompt, most = task
    body = {"model": "policy", "messages": [{"role": "user", "content": prompt}], "max_tokens": most}
    async with httpx.AsyncClient(trust_env=False, timeout=600) as client:
        headers = {"Authorization": f"Bearer {address.api_key}"}
        answer = await client.post(f"{address.base_url}/chat/completions", json=body, headers=headers)
        answer.raise_for_status()


def tasks(numbers: random.Random) -> list[tuple[str, int]]:
    """Return one to four prompts of random length, each with the most tokens of its answers."""
    return [
        (" ".join(numbers.choices(WORDS, k=numbers.randint(20, 350))), numbers.randint(2, 24))
        for _ in range(numbers.randint(1, 4))
    ]


def largest() -> list[tuple[str, int]]:
    """Return the most that :func:`tasks` can: a process that has done this once has taken what any step needs."""
    return [(" ".join(random.Random(0).choices(WORDS, k=350)), 24)] * 4


def resident(process: psutil.Process) -> int:
    return process.memory_info().rss // 2**20


async def soak(folder: Path, steps: int) -> list[Held]:
    numbers, trainer, held = random.Random(0), psutil.Process(), []
    model = await asyncio.to_thread(save_model, folder / "model")
    async with art.open_run(folder / "run", model=model, learner="torch", checkpoint_every=10, seed=0) as run:
        for _ in range(steps):
            groups = await run.collect(agent, tasks(numbers) if held else largest(), group_size=4)
            groups = await run.score(groups, lambda trajectory: int(trajectory.rollout_id[:8], 16) % 1000 / 1000)
            metrics = await run.learn(groups)
            (engine,) = [it for it in trainer.children() if "art_core.serving.process" in " ".join(it.cmdline())]
            held.append(Held(int(metrics["tokens"]), resident(trainer), resident(engine)))
            print(json.dumps(asdict(held[-1])), flush=True)
    return held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    os.environ.setdefault("OPENAI_API_KEY", "unused: the policy answers")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(soak(Path(folder), options.steps))


if __name__ == "__main__":
    sys.exit(main())
