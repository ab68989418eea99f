"""Converts lessons to batches of token ids and loss weights."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from examples.email_search.mailbox import open_mailbox
from tiny.demonstrations import MAKING_MAILBOXES, OPENAI_TOOLS, SKILLED, ChatMessage, Habits, demonstrate
from tiny.drills import Pieces
from tiny.fragments import make_fragment

BACKGROUND = 0.03
"""Loss weight of tokens that a lesson isn't about."""
REACH = 400
"""Drills and fragments start at a random position below this, because in real conversations turns come later."""


@dataclass(frozen=True)
class Batch:
    """Right-padded lessons."""

    ids: Tensor
    """(lessons, length) int64."""
    weights: Tensor
    """(lessons, length) float32: loss weight of predicting each token; 0 for padding, 1 for labels."""
    start: int = 0
    """The position of the first token."""


def drill_batch(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, size: int, make: Callable[[random.Random], Pieces]
) -> Batch:
    """Return ``size`` drills."""
    rows = []
    for _ in range(size):
        text, spans = "", []
        for piece, learnt in make(rng):
            spans += [(len(text), len(text) + len(piece))] if learnt else []
            text += piece
        rows.append(_weigh(tokenizer, text, spans))
    return _pad(rows, start=rng.randrange(REACH))


def fragment_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random, size: int, level: int) -> Batch:
    """Return ``size`` fragments."""
    rows = []
    for _ in range(size):
        fragment = make_fragment(rng, level)
        text = tokenizer.apply_chat_template(fragment.messages, tokenize=False)
        begin = text.rindex(fragment.label)
        rows.append(_weigh(tokenizer, text, [(begin, begin + len(fragment.label))]))
    return _pad(rows, start=rng.randrange(REACH))


def skilled_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random, size: int) -> Batch:
    """Return ``size`` complete conversations of a flawless agent; the arguments of its calls have weight 1."""
    rows = []
    for _ in range(size):
        messages, text = _conversation(tokenizer, rng, SKILLED)
        spans, position = [], 0
        for message in messages:
            for call in message.get("tool_calls", ()):
                arguments = call["function"]["arguments"]
                position = text.index(arguments, position)
                spans.append((position, position + len(arguments)))
        rows.append(_weigh(tokenizer, text, spans))
    return _pad(rows)


def demonstration_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random, size: int, habits: Habits) -> Batch:
    """Return ``size`` complete conversations; the agent's messages have weight 1."""
    rows = []
    for _ in range(size):
        _, text = _conversation(tokenizer, rng, habits)
        ids = tokenizer(text)["input_ids"]
        rows.append((ids, _agent_weights(tokenizer, ids)))
    return _pad(rows)


def _conversation(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, habits: Habits
) -> tuple[list[ChatMessage], str]:
    mailbox = open_mailbox(rng.choice(MAKING_MAILBOXES))
    messages = demonstrate(rng, mailbox, rng.choice(mailbox.facts), habits).messages
    return messages, tokenizer.apply_chat_template(messages, tools=OPENAI_TOOLS, tokenize=False)


def _weigh(
    tokenizer: PreTrainedTokenizerFast, text: str, spans: list[tuple[int, int]]
) -> tuple[list[int], list[float]]:
    """Return ids and weights: 1 for tokens that begin within one of ``spans``, else ``BACKGROUND``."""
    encoded = tokenizer(text, return_offsets_mapping=True)
    starts = [start for start, _ in encoded["offset_mapping"]]
    weights = [1.0 if any(begin <= start < end for begin, end in spans) else BACKGROUND for start in starts]
    return encoded["input_ids"], weights


def _agent_weights(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[float]:
    turn_start = tokenizer("<|im_start|>assistant\n")["input_ids"]
    weights, speaking = [], False
    for position, token in enumerate(ids):
        weights.append(1.0 if speaking else BACKGROUND)
        if token == tokenizer.eos_token_id:
            speaking = False
        elif ids[position - len(turn_start) + 1 : position + 1] == turn_start:
            speaking = True
    return weights


def _pad(rows: list[tuple[list[int], list[float]]], start: int = 0) -> Batch:
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows])
    weights = torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in rows])
    return Batch(ids, weights, start)
