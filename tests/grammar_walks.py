"""Answers under a grammar: from a model that knows nothing, and given ones; and tokenizers that differ in their markers."""

from __future__ import annotations

import json
import random

import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from art_embedded.formats.thinking import Place
from art_embedded.grammar import Grammar, Grammars
from art_embedded.requests import Shape
from art_embedded.sampling import Draw, sample

STOP = 2


def walk(
    grammars: Grammars,
    shape: Shape,
    seed: int,
    width: int,
    spread: float = 1.0,
    longest: int = 3000,
    place: Place = "after",
) -> list[int]:
    """Sample an answer from a model that knows nothing: the logits are noise."""
    noise = torch.Generator().manual_seed(seed)
    draw = Draw(random=random.Random(seed), grammar=grammars.begin(shape, place))
    ids: list[int] = []
    while STOP not in ids:
        assert len(ids) < longest, "no end in sight"
        [sampled] = sample(torch.randn(1, width, generator=noise) * spread, [draw])
        assert draw.grammar.error is None
        ids.append(sampled.token)
    return ids


TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def variant(tokenizer: PreTrainedTokenizerFast, markers: str, texts: tuple[str, ...] = TAGS) -> PreTrainedTokenizerFast:
    """The tokenizer with markers as special tokens, as plain ones, or without them."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    described["added_tokens"] = [added for added in described["added_tokens"] if "tool_call" not in added["content"]]
    backend = type(tokenizer.backend_tokenizer).from_str(json.dumps(described))
    if markers != "none":
        backend.add_tokens([AddedToken(text, special=markers == "special") for text in texts])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def follow(started: Grammar, ids: list[int]) -> list[int]:
    """Go through ``ids`` and return how many tokens were legal at each of them."""
    counts = []
    for token in ids:
        legal = started.legal(32 * started._bits.shape[1])
        assert legal[token], f"token {len(counts)} is not legal"
        counts.append(int(legal.sum()))
        started.take(token)
    return counts
