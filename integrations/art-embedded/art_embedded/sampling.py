"""Samples tokens from logits, with separate settings per row."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from art_embedded.grammar import Grammar

BLOCK = 256
"""Tokens whose probabilities are summed at once."""
LOWEST = -1e30
"""Logprob that replaces minus infinity, so that a row whose legal tokens all have zero probability doesn't become NaN."""


@dataclass
class Draw:
    """How one sequence is sampled."""

    temperature: float = 1.0
    """0: the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    top_logprobs: int = 0
    """Number of alternatives to report per token."""
    random: random.Random = field(default_factory=random.Random)
    """One per sequence, so that a seeded request doesn't depend on concurrent ones."""
    grammar: Grammar | None = None
    """Constrains what may be sampled; None: no constraint."""


@dataclass(frozen=True)
class Sampled:
    """One sampled token."""

    token: int
    logprob: float
    """Logprob at the draw's temperature (1 if that is 0), before truncation and masking."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens with their logprobs, if requested."""
    forced: bool = False
    """Whether the grammar allowed no other token."""


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    """Sample one token per row of ``logits``, (rows, vocabulary) float32, with one draw per row.

    Advances the draws' grammars. If a grammar gets stuck, it sets ``Grammar.error``, and its row's token is meaningless.
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
    """Return the renormalized logprobs under the rows' grammars, and the rows with only one legal token."""
    rows = [row for row, draw in enumerate(draws) if draw.grammar is not None]
    if not rows:
        return logprobs, set()
    legal = np.stack([draws[row].grammar.legal(logprobs.shape[-1]) for row in rows])
    forced = {row for row, count in zip(rows, np.count_nonzero(legal, axis=1), strict=True) if count == 1}
    part = logprobs[rows].clamp_(min=LOWEST).masked_fill_(torch.from_numpy(~legal).to(logprobs.device), float("-inf"))
    # Renormalize in log space: exp() of plain float32 logprobs underflows to 0 below -104.
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
    uniform = torch.tensor([1.0 - draw.random.random() for draw in draws], dtype=torch.float64, device=logprobs.device)
    tokens = _invert(_truncate(logprobs, draws).exp(), uniform)
    if any(greedy):
        tokens = torch.where(torch.tensor(greedy, device=logprobs.device), logprobs.argmax(-1), tokens)
    return tokens


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the token (rows,) of each row at which the cumulative probability reaches ``uniform``, in (0, 1], of its sum.

    Inverse transform sampling needs one random number per row, whatever the vocabulary. Only one block is summed token by token:
    in float64, which the whole vocabulary would need too, that takes longer than the model's head. With numbers above 0 and
    searchsorted's left side, a token of zero probability is never chosen.
    """
    blocks = torch.nn.functional.pad(probabilities, (0, -probabilities.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    block, rest = _first_reaching(blocks.sum(-1).double(), uniform)
    inside = blocks[torch.arange(len(blocks), device=blocks.device), block].double()
    place, _ = _first_reaching(inside, rest / inside.sum(-1))
    # A NaN row, from a broken model, must not break the other rows.
    return (block * BLOCK + place).clamp(max=probabilities.shape[-1] - 1)


def _first_reaching(masses: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index (rows,) at which the cumulative mass of each row reaches ``share`` of the sum, and what of that share its
    own mass covers."""
    cumulative = masses.cumsum(-1)
    wanted = share.clamp(max=1.0)[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, wanted).clamp(max=masses.shape[-1] - 1)
    # Not what the cumulative mass at the index exceeds: rounded, that may leave 0.
    return index[:, 0], (wanted - torch.nn.functional.pad(cumulative, (1, 0)).gather(1, index))[:, 0]


def _truncate(logprobs: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Remove the tokens that top_k, and top_p of what it leaves, exclude, in the rows that set them.

    The most likely token always stays.
    """
    rows = [row for row, draw in enumerate(draws) if draw.top_p < 1.0 or draw.top_k]
    if not rows:
        return logprobs
    device = logprobs.device
    ordered, order = logprobs[rows].sort(-1, descending=True)
    top_p = torch.tensor([draws[row].top_p for row in rows], device=device)[:, None]
    top_k = torch.tensor([draws[row].top_k or logprobs.shape[-1] for row in rows], device=device)[:, None]
    ordered = ordered.masked_fill(torch.arange(logprobs.shape[-1], device=device) >= top_k, float("-inf"))
    probabilities = ordered.softmax(-1)
    removed = (probabilities.cumsum(-1) - probabilities >= top_p) & (top_p < 1.0)
    removed[:, 0] = False
    truncated = logprobs.clone()
    truncated[rows] = torch.empty_like(ordered).scatter_(1, order, ordered.masked_fill(removed, float("-inf")))
    return truncated


def _alternatives(logprobs: Tensor, draws: Sequence[Draw]) -> list[tuple[tuple[int, float], ...]]:
    most = max(draw.top_logprobs for draw in draws)
    if not most:
        return [()] * len(draws)
    values, tokens = logprobs.topk(min(most, logprobs.shape[-1]))
    candidates = [tuple(zip(ids, row, strict=True)) for ids, row in zip(tokens.tolist(), values.tolist(), strict=True)]
    return [alternatives[: draw.top_logprobs] for alternatives, draw in zip(candidates, draws, strict=True)]
