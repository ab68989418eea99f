"""Make the start model from scratch: python -m examples.coding.make_start

Trains tokenizer and weights, with a seed, on one CPU core, on demonstrations of training combinations only: first by a
programmer who is always right, then, linearly more, by a mediocre one (``demonstrations.py``). No other model is involved.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tiny.lessons import Batch
from tiny.make import save
from tiny.tokenizer import CHAT_TEMPLATE, make_tokenizer
from tiny.training import make_model, train

from .demonstrations import converse
from .tasks import VOCABULARY

FOLDER = Path(__file__).parent / "start_model"
STEPS = 1200
SKILLED_UNTIL = 500
"""From this step on the mediocre programmer takes over, linearly, while the learning rate falls."""
MEDIOCRE_ALONE = 900
BATCH_SIZE = 24
BACKGROUND = 0.03
"""The loss weight of tokens that the assistant doesn't write."""
PIECES = Regex(r"\n| *\p{L}+| *\p{N}|[^\p{L}\p{N}\n]+")
"""Half as many tokens as with separate spaces; only single digits are ever copied here."""


def lessons(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[str, Batch]]:
    """Yield batches of conversations."""
    rng = random.Random(seed)
    for step in itertools.count():
        skilled = rng.random() >= (step - SKILLED_UNTIL) / (MEDIOCRE_ALONE - SKILLED_UNTIL)
        rows = [_row(tokenizer, converse(rng, skilled=skilled)) for _ in range(BATCH_SIZE)]
        length = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows])
        weights = torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in rows])
        yield "skilled" if skilled else "mediocre", Batch(ids, weights)


def _row(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, str]]) -> tuple[list[int], list[float]]:
    """Return a conversation's tokens and their loss weights: 1 for the assistant's, including the end of its turn."""
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assistant, position = [], 0
    for message in messages:
        begin = text.index(message["content"], position)
        position = text.index(tokenizer.eos_token, begin) + len(tokenizer.eos_token)
        if message["role"] == "assistant":
            assistant.append(range(begin, position))
    encoded = tokenizer(text, return_offsets_mapping=True)
    starts = [start for start, _ in encoded["offset_mapping"]]
    return encoded["input_ids"], [1.0 if any(start in span for span in assistant) else BACKGROUND for start in starts]


def main() -> None:
    """Make the model and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    render = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=CHAT_TEMPLATE)
    texts = [render.apply_chat_template(converse(rng, skilled=False), tokenize=False) for _ in range(1500)]
    tokenizer = make_tokenizer(texts, VOCABULARY, vocab_size=1024, pieces=PIECES)
    model = make_model(len(tokenizer))
    print(f"{len(tokenizer)} tokens, {sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters", flush=True)

    def report(step: int, accuracy: dict[str, float], cpu_seconds: float) -> None:
        right = ", ".join(f"{name} {share:.3f}" for name, share in accuracy.items())
        print(f"step {step}/{STEPS}  {cpu_seconds:.0f} CPU-s  right tokens: {right}", flush=True)

    train(model, lessons(tokenizer, options.seed), STEPS, decay_from=SKILLED_UNTIL, decay_to=STEPS, report=report)
    print(f"sha256 {save(model, tokenizer, options.out)}  {options.out / 'model.safetensors'}")


if __name__ == "__main__":
    main()
