"""Hidden states -> logprobs of chosen tokens, computing one chunk of logits at a time.

No (tokens x vocabulary) tensor exists: each chunk's logits are reduced to the targets' logprobs, dropped, and recomputed in
the backward pass, like checkpointing (Chen et al., arXiv 1604.06174), so only one chunk at a time takes memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = 2**24  # most logits in memory at a time: 64 MiB in float32


@dataclass(frozen=True)
class Head:
    """The language-model head of a transformers model: logits = cap(scale * (weight @ hidden + bias))."""

    projection: nn.Linear
    scale: float = 1.0
    cap: float | None = None
    """cap(z) = cap * tanh(z / cap); None: no cap."""


@dataclass(frozen=True)
class Targets:
    """The tokens whose logprobs to compute. Several targets may share a row of logits."""

    rows: Tensor
    """(targets,) int64, ascending: the row of hidden states that predicts each target."""
    tokens: Tensor
    """(targets,) int64."""
    temperatures: Tensor
    """(rows,) float32: the distribution is softmax(logits / temperature)."""


def head_of(model: nn.Module) -> Head | None:
    """Return the head of a transformers causal LM if it is a plain projection, else None."""
    projection = model.get_output_embeddings()
    if type(projection) is not nn.Linear:
        return None
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    if divisor := getattr(config, "logits_scaling", None):
        scale /= divisor
    cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return Head(projection, scale, cap)


def logprobs_of(hidden: Tensor, head: Head, targets: Targets) -> tuple[Tensor, Tensor]:
    """Return the targets' logprobs (differentiable) and the entropies of their distributions in nats (not differentiable).

    ``hidden`` is (rows, hidden size); both results are (targets,), float32, or float64 if the model is.
    """
    return _Logprobs.apply(hidden, head.projection.weight, head.projection.bias, head, targets)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, targets: Targets
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias)
        ctx.head, ctx.targets = head, targets
        logprobs, entropies = [], []
        for rows, members in _chunks(targets, len(hidden), len(weight)):
            scores, _ = _scores(hidden[rows], weight, bias, head, targets.temperatures[rows])
            local = targets.rows[members] - rows.start
            normaliser = scores.logsumexp(-1)
            logprobs.append(scores[local, targets.tokens[members]] - normaliser[local])
            entropies.append((normaliser - ((scores - normaliser[:, None]).exp_() * scores).sum(-1))[local])
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        head, targets = ctx.head, ctx.targets
        dhidden = torch.empty_like(hidden)
        dweight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        dbias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for rows, members in _chunks(targets, len(hidden), len(weight)):
            scores, slope = _scores(hidden[rows], weight, bias, head, targets.temperatures[rows])
            local = targets.rows[members] - rows.start
            total = grad.new_zeros(len(scores)).index_add_(0, local, grad[members])
            delta = scores.sub_(scores.logsumexp(-1, keepdim=True)).exp_().mul_(-total[:, None])
            delta.index_put_((local, targets.tokens[members]), grad[members], accumulate=True)
            delta.mul_(slope if isinstance(slope, Tensor) else torch.as_tensor(slope, dtype=delta.dtype))
            delta = delta.to(weight.dtype)
            torch.mm(delta, weight, out=dhidden[rows])
            if dweight is not None:
                dweight.addmm_(delta.T, hidden[rows])
            if dbias is not None:
                dbias += delta.sum(0)
        return dhidden, dweight, dbias, None, None


def _scores(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, temperatures: Tensor
) -> tuple[Tensor, Tensor | float]:
    """Return logits / temperature (rows, vocabulary) and their derivative with respect to the projection's output."""
    scores = hidden @ weight.T if bias is None else torch.addmm(bias, hidden, weight.T)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    slope: Tensor | float = head.scale
    if head.scale != 1:
        scores = scores.mul_(head.scale)
    if head.cap is not None:
        scores = scores.div_(head.cap).tanh_()
        slope = (1 - scores.square()).mul_(head.scale)
        scores = scores.mul_(head.cap)
    if (temperatures != 1).any():
        scores = scores.div_(temperatures[:, None].to(scores.dtype))
        slope = slope / temperatures[:, None].to(scores.dtype)
    return scores, slope


def _chunks(targets: Targets, rows: int, vocabulary: int) -> list[tuple[slice, slice]]:
    """Return each chunk's (rows, targets)."""
    size = max(1, CHUNK // vocabulary)
    firsts = torch.arange(0, rows + size, size, device=targets.rows.device)
    bounds = torch.searchsorted(targets.rows, firsts).tolist()
    return [
        (slice(first, min(first + size, rows)), slice(bounds[number], bounds[number + 1]))
        for number, first in enumerate(range(0, rows, size))
    ]
