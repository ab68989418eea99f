"""Create the tiny model from scratch: tokenizer, weights and all other files of ``art_embedded/models/tiny``.

    python -m tiny.make --out integrations/art-embedded/art_embedded/models/tiny

Seeded; uses one CPU core. ``tiny/README.md`` says what to expect.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.email_search.mailbox import open_mailbox
from tiny.demonstrations import MAKING_MAILBOXES, OPENAI_TOOLS, Habits, demonstrate
from tiny.drills import WORDS, make_drill, repeat_words
from tiny.lessons import Batch, demonstration_batch, drill_batch, fragment_batch, skilled_batch
from tiny.tokenizer import CHAT_TEMPLATE, make_tokenizer
from tiny.training import make_model, train
from tiny.trial import try_out

STEPS = 2600
REPEAT_UNTIL = 300
"""Until this step, only repeating words: the model learns nothing else before it can copy."""
DRILLS_UNTIL = 600
"""Then drills with a few fragments."""
SKILLS_UNTIL = 1600
"""Then drills, fragments and flawless conversations. After that, mostly wrong conversations take over linearly while the learning
rate falls."""
LEVEL_UP_EVERY = 60
"""Steps after which fragments may contain one more result or fact."""
TOOL_ERRORS = (
    "Error invoking tool 'read_email' with kwargs {'id': 12} with error:\n id: Field required\n"
    " Please fix the error and try again.",
    "Error: search is not a valid tool, try one of [search_inbox, read_email, return_final_answer].",
    "keywords: Input should be a valid list, string or integer",
)
"""LangGraph's replies to invalid calls, so that the tokenizer learns merges for them."""


def tokenizer_texts(seed: int, conversations: int = 1500) -> Iterator[str]:
    """Yield rendered conversations and the tools' error messages."""
    render = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    rng = random.Random(seed)
    for _ in range(conversations):
        mailbox = open_mailbox(rng.choice(MAKING_MAILBOXES))
        conversation = demonstrate(rng, mailbox, rng.choice(mailbox.facts), Habits())
        yield render.apply_chat_template(conversation.messages, tools=OPENAI_TOOLS, tokenize=False)
    yield from TOOL_ERRORS * 50


def lessons(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[str, Batch]]:
    """Yield named batches, in the order of the constants above."""
    rng = random.Random(seed)
    for step in itertools.count():
        if step < REPEAT_UNTIL:
            kind = "repeating"
        elif step < DRILLS_UNTIL:
            kind = rng.choices(["drills", "fragments"], [0.8, 0.2])[0]
        elif rng.random() < (step - SKILLS_UNTIL) / (STEPS - SKILLS_UNTIL):
            kind = "demonstrations"
        else:
            kind = rng.choices(["drills", "fragments", "skilled"], [0.2, 0.35, 0.45])[0]
        yield kind, _batch(tokenizer, rng, kind, step)


def _batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random, kind: str, step: int) -> Batch:
    match kind:
        case "repeating":
            return drill_batch(tokenizer, rng, 32, repeat_words)
        case "drills":
            return drill_batch(tokenizer, rng, 32, make_drill)
        case "fragments":
            return fragment_batch(tokenizer, rng, 32, level=min(4, 1 + step // LEVEL_UP_EVERY))
        case "skilled":
            return skilled_batch(tokenizer, rng, 8)
    return demonstration_batch(tokenizer, rng, 8, Habits())


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    """Save the model in float16, to be loaded as float32; return the SHA-256 of the weights."""
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=2, pad_token_id=0
    )
    model.half().save_pretrained(folder)
    model.float()
    # float16 halves the file size, but most CPUs compute in it slowly or not at all.
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"float16"', '"float32"'))
    tokenizer.save_pretrained(folder)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    """Train, save and evaluate the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="output folder, such as integrations/art-embedded/art_embedded/models/tiny",
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"stop after this step, for experiments (default {STEPS})"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument(
        "--questions", type=int, default=256, help="held-out questions in the final evaluation (default 256)"
    )
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

    train(model, lessons(tokenizer, args.seed), args.steps, decay_from=SKILLS_UNTIL, decay_to=STEPS, report=report)
    print(f"sha256 {save(model, tokenizer, args.out)}  {args.out / 'model.safetensors'}", flush=True)
    for name, greedy in (("sampled at temperature 1", False), ("greedy", True)):
        rates = try_out(model, tokenizer, args.questions, greedy=greedy)
        print(f"{name}: " + ", ".join(f"{key} {rate:.1%}" for key, rate in rates.items()), flush=True)


if __name__ == "__main__":
    main()
