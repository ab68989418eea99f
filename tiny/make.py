"""Make the tiny model from nothing: tokenizer, weights and everything that stands in ``art_core/models/tiny``.

    python -m tiny.make --out art_core/models/tiny

Seeded, on one CPU core. ``tiny/README.md`` says what to expect.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.email_search.mailbox import ATTRIBUTES, CITIES, KINDS, MONTHS, PEOPLE, PROJECTS, open_mailbox
from tiny.demonstrations import MAKING_MAILBOXES, OPENAI_TOOLS, Habits, demonstrate
from tiny.drills import make_drill, repeat_words
from tiny.lessons import Batch, demonstration_batch, drill_batch, fragment_batch
from tiny.tokenizer import CHAT_TEMPLATE, make_tokenizer
from tiny.training import make_model, train
from tiny.trial import try_out

STEPS = 6000
FRAGMENTS_ALONE = 0.6
"""The share of steps before the first whole conversation; from there on conversations take over linearly."""
REPEAT_STEPS = 300
DRILL_STEPS = 600
LEVEL_UP_EVERY = 60
"""Steps until fragments may show one more result or fact."""
WORDS = [*PROJECTS, *KINDS, *PEOPLE, *CITIES, *MONTHS, *ATTRIBUTES]
TOOL_ERRORS = (
    "Error invoking tool 'read_email' with kwargs {'id': 12} with error:\n id: Field required\n"
    " Please fix the error and try again.",
    "Error: search is not a valid tool, try one of [search_inbox, read_email, return_final_answer].",
    "keywords: Input should be a valid list, string or integer",
)
"""Texts that LangGraph may answer a wrong call with, so that they are not spelt out in bytes."""


def tokenizer_texts(seed: int, conversations: int = 1500) -> Iterator[str]:
    """Yield rendered conversations, and the error messages that tools may answer with."""
    render = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    rng = random.Random(seed)
    for _ in range(conversations):
        mailbox = open_mailbox(rng.choice(MAKING_MAILBOXES))
        conversation = demonstrate(rng, mailbox, rng.choice(mailbox.facts), Habits())
        yield render.apply_chat_template(conversation.messages, tools=OPENAI_TOOLS, tokenize=False)
    yield from TOOL_ERRORS * 50


def lessons(tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> Iterator[tuple[str, Batch]]:
    """Yield named batches: fragments first, then more and more whole conversations."""
    rng = random.Random(seed)
    for step in range(steps):
        alone = FRAGMENTS_ALONE * steps
        if step < REPEAT_STEPS:
            yield "repeating", drill_batch(tokenizer, rng, 32, repeat_words)
        elif rng.random() < (step - alone) / (steps - alone):
            yield "conversations", demonstration_batch(tokenizer, rng, 8, Habits())
        elif rng.random() < (0.8 if step < DRILL_STEPS else 0.25):
            yield "drills", drill_batch(tokenizer, rng, 32, make_drill)
        else:
            level = min(4, 1 + step // LEVEL_UP_EVERY)
            yield "fragments", fragment_batch(tokenizer, rng, 32, level)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    """Write the model in 16 bits, to be loaded in 32; return the SHA-256 of the weights."""
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=2, pad_token_id=0
    )
    model.half().save_pretrained(folder)
    model.float()
    # Half precision saves half the file; most CPUs compute in it slowly or not at all.
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"float16"', '"float32"'))
    tokenizer.save_pretrained(folder)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    """Make the model, save it and try it out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write, such as art_core/models/tiny")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps (default {STEPS})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--questions", type=int, default=256, help="held-out questions for the trial at the end")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    tokenizer = make_tokenizer(tokenizer_texts(args.seed), WORDS, vocab_size=1024)
    model = make_model(len(tokenizer))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{len(tokenizer)} tokens, {parameters / 1e6:.2f}M parameters, {args.steps} steps", flush=True)

    def report(step: int, accuracy: dict[str, float], cpu_seconds: float) -> None:
        right = ", ".join(f"{name} {share:.3f}" for name, share in accuracy.items())
        print(f"step {step}/{args.steps}  {cpu_seconds:.0f} CPU-s  right tokens: {right}", flush=True)

    decay_from = round(FRAGMENTS_ALONE * args.steps)
    train(model, lessons(tokenizer, args.seed, args.steps), args.steps, decay_from=decay_from, report=report)
    print(f"sha256 {save(model, tokenizer, args.out)}  {args.out / 'model.safetensors'}", flush=True)
    for name, greedy in (("sampled at temperature 1", False), ("greedy", True)):
        rates = try_out(model, tokenizer, args.questions, greedy=greedy)
        print(f"{name}: " + ", ".join(f"{key} {rate:.1%}" for key, rate in rates.items()), flush=True)


if __name__ == "__main__":
    main()
