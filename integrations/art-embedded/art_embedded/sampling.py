"""Logits -> sampled tokens with their logprobs, every row with its own settings. Knows nothing about requests or caches."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from art_embedded.grammar import Grammar

LOWEST = -1e30
"""Stands for a probability of zero where all that a grammar allows has none: no arithmetic makes NaN of it."""


@dataclass
class Draw:
    """How one sequence is sampled."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    top_logprobs: int = 0
    """How many alternatives to report per token."""
    random: random.Random = field(default_factory=random.Random)
    """Every sequence has its own, so that a seeded request does not depend on what else is running."""
    grammar: Grammar | None = None
    """What may be sampled; None: everything."""


@dataclass(frozen=True)
class Sampled:
    """One token."""

    token: int
    logprob: float
    """Of the distribution at the draw's temperature before any truncation and mask; of temperature 1 where it is 0."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens with their logprobs, where asked for."""
    forced: bool = False
    """Whether the grammar allowed no other."""


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """Sample one token per row of ``logits``, (rows, vocabulary) float32; one draw per row.

    Grammars take their tokens. One that cannot go on says so in ``Grammar.error``: its row's token means nothing.
    """
    temperatures = [draw.temperature or 1.0 for draw in draws]
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    allowed, forced = _constrain(logprobs, draws)
    tokens = _choose(allowed, draws)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    # One transfer from the device per step; float64 holds every token id exactly.
    pairs = torch.stack([tokens.double(), chosen.double()], dim=1).tolist()
    tops = _alternatives(logprobs, draws)
    for draw, (token, logprob) in zip(draws, pairs, strict=True):
        if draw.grammar is not None:
            draw.grammar.take(int(token), possible=math.isfinite(logprob))
    return [
        Sampled(int(token), logprob, top, row in forced)
        for row, ((token, logprob), top) in enumerate(zip(pairs, tops, strict=True))
    ]


def _constrain(logprobs: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, set[int]]:
    """Return the logprobs of what the rows' grammars allow, normalised anew, and the rows with one such token."""
    rows = [row for row, draw in enumerate(draws) if draw.grammar is not None]
    if not rows:
        return logprobs, set()
    legal = np.stack([draws[row].grammar.legal(logprobs.shape[-1]) for row in rows])
    forced = {row for row, count in zip(rows, np.count_nonzero(legal, axis=1), strict=True) if count == 1}
    part = logprobs[rows].clamp_(min=LOWEST).masked_fill_(torch.from_numpy(~legal).to(logprobs.device), float("-inf"))
    # However little the model gives to all of it together: exp() of the plain logprobs would be 0 below -104.
    part = torch.log_softmax(part, dim=-1)
    if len(rows) == len(draws):
        return part, forced
    allowed = logprobs.clone()
    allowed[rows] = part
    return allowed, forced


def _choose(logprobs: Tensor, draws: Sequence[Draw]) -> Tensor:
    greedy = [draw.temperature == 0 for draw in draws]
    if all(greedy):
        return logprobs.argmax(-1)
    # The inverse of the cumulative distribution needs one random number per row, whatever the vocabulary. In (0, 1]
    # with the left neighbour rule a token without probability is never found.
    uniform = torch.tensor([1.0 - draw.random.random() for draw in draws], dtype=torch.float64, device=logprobs.device)
    cumulative = _truncate(logprobs, draws).exp().cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:])[:, 0]
    # A row that is not a number, from a broken model, must not end the other rows' answers.
    tokens = tokens.clamp(max=logprobs.shape[-1] - 1)
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=logprobs.device), logprobs.argmax(-1), tokens)
    return tokens


def _truncate(logprobs: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Remove what top_p and top_k exclude, in the rows that ask for it; the most likely token always stays."""
    rows = [row for row, draw in enumerate(draws) if draw.top_p < 1.0 or draw.top_k]
    if not rows:
        return logprobs
    device = logprobs.device
    ordered, order = logprobs[rows].sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    top_p = torch.tensor([draws[row].top_p for row in rows], device=device)[:, None]
    top_k = torch.tensor([draws[row].top_k or logprobs.shape[-1] for row in rows], device=device)[:, None]
    removed = (before >= top_p) | (torch.arange(logprobs.shape[-1], device=device) >= top_k)
    removed[:, 0] = False
    truncated = logprobs.clone()
    truncated[rows] = torch.empty_like(ordered).scatter_(1, order, ordered.masked_fill(removed, float("-inf")))
    return truncated


def _alternatives(logprobs: Tensor, draws: Sequence[Draw]) -> list[tuple[tuple[int, float], ...]]:
    most = max(draw.top_logprobs for draw in draws)
    if not most:
        return [()] * len(draws)
    values, tokens = logprobs.topk(min(most, logprobs.shape[-1]))
    listed = [tuple(zip(ids, row, strict=True)) for ids, row in zip(tokens.tolist(), values.tolist(), strict=True)]
    return [alternatives[: draw.top_logprobs] for alternatives, draw in zip(listed, draws, strict=True)]
