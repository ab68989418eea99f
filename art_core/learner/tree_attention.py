"""Attention over a token tree without a mask: one call of the CPU's flash kernel for each segment of the tree.

A segment is a run of tokens without a branch inside. In depth-first order its descendants follow it directly, so the
queries that see its keys are one slice: its own tokens causally, its descendants' wholly. That is one causal kernel call
with more queries than keys. The partial results of a token's ancestors are merged by their log-sum-exp, which is exact
(Milakov and Gimelshein, arXiv 1805.02867); the kernel's own backward pass, given the merged result instead of its own,
yields the segment's part of the gradient, because that pass needs no more of the softmax than its normaliser (Dao,
FlashAttention-2, arXiv 2307.08691, section 3.1.2).

Knows nothing about calls, targets or losses: the tree arrives as a small integer tensor in the place of the mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from art_core.learner.last_layer import spread, wanted_rows

ATTENTION = "art_tree"
"""The name under which models find ``attend``."""
WINDOW_QUERIES = 512
"""Queries of one kernel call where a window slides: its mask has this many rows and little more than a window's columns."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Segment(NamedTuple):
    """One row of the tensor that stands for the tree; tokens are counted over the whole tree."""

    start: int
    end: int
    last: int
    """Where its descendants end."""
    depth: int
    """Of its first token."""
    window: int
    """The sliding window in tokens of depth; 0 where there is none."""


@dataclass(frozen=True)
class Block:
    """One kernel call: queries ``q0`` to ``q1`` look at keys ``k0`` to ``k1``."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    """Query i sees keys 0 to i of the block; else every query sees every key that the mask leaves."""
    window: int = 0
    """0 where no mask is needed."""

    def mask(self, depths: Tensor, queries: int, dtype: torch.dtype) -> Tensor | None:
        """Return what is added to the scores, (1, 1, q1 - q0, k1 - k0), or None; ``depths`` are those of all tokens."""
        if not self.window:
            return None
        first = len(depths) - queries
        rows = torch.arange(first + self.q0, first + self.q1)[:, None]
        columns = torch.arange(self.k0, self.k1)
        seen = (columns <= rows) & (depths[rows] - depths[columns] < self.window)
        # Finite, because a row may see none of these keys: its partial result then has no weight in the merge.
        return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Answer transformers' attention interface: queries are the last tokens of the keys' tokens.

    ``attention_mask`` is a tree: (1, 1, segments, 5) int64, a ``Segment`` a row. With anything else this is transformers'
    own SDPA attention, so a model left at ``ATTENTION`` still computes plain rows.
    """
    plain = attention_mask is None or attention_mask.dtype != torch.int64
    if softcap is not None or (plain and s_aux is not None):
        raise NotImplementedError(
            f"{ATTENTION} has no soft cap, and sinks along a tree only; call model.set_attn_implementation('eager')"
        )
    if plain:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout:
        raise NotImplementedError(
            "attention along a tree has no dropout; set attention_dropout to 0 or call model.eval()"
        )
    width = value.shape[-1]
    if width < key.shape[-1]:  # multi-head latent attention: the kernel wants values as wide as keys
        value = pad(value, (0, key.shape[-1] - width))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    segments = [Segment(*row) for row in attention_mask[0, 0].tolist()]
    queries, tokens = query.shape[2], key.shape[2]
    first, depths = tokens - queries, _depths(segments, tokens)
    rows = wanted_rows(module)
    if rows is None or any(it.window for it in segments):
        out = _TreeAttention.apply(query, key, value, s_aux, scale, list(_blocks(segments, first, tokens)), depths)
    else:
        blocks = list(_blocks_of_rows(segments, rows.numpy(), first, tokens))
        out = _TreeAttention.apply(query.index_select(2, rows), key, value, s_aux, scale, blocks, depths)
        out = spread(out, 2, rows, queries)
    return out[..., :width].transpose(1, 2).contiguous(), None


class _TreeAttention(torch.autograd.Function):
    """Queries (1, heads, queries, size), keys and values (1, key heads, tokens, size) -> (1, heads, queries, size)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scale: float,
        blocks: list[Block],
        depths: Tensor,
    ) -> Tensor:
        q, k, v = _grouped(query, key.shape[1]), key[0].unsqueeze(1), value[0].unsqueeze(1)
        precise = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=precise)
        lse = torch.full(q.shape[:-1], float("-inf"), dtype=precise)
        for block in blocks:
            mask = block.mask(depths, q.shape[2], q.dtype)
            part, part_lse = _flash(*_slices(block, q, k, v), 0.0, block.causal, attn_mask=mask, scale=scale)
            _merge(out[:, :, block.q0 : block.q1], lse[:, :, block.q0 : block.q1], part, part_lse)
        if sinks is not None:
            total = torch.logaddexp(lse, _per_head(sinks, lse))
            out.mul_((lse - total).exp_().unsqueeze(-1))
            lse = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.scale, ctx.blocks, ctx.depths = scale, blocks, depths
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks = ctx.saved_tensors
        q, k, v = _grouped(query, key.shape[1]), key[0].unsqueeze(1), value[0].unsqueeze(1)
        grad = _grouped(grad, key.shape[1])
        dq = torch.zeros(q.shape, dtype=q.dtype)
        dk, dv = torch.zeros(k.shape, dtype=k.dtype), torch.zeros(v.shape, dtype=v.dtype)
        for block in ctx.blocks:
            rows, columns = slice(block.q0, block.q1), slice(block.k0, block.k1)
            mask = block.mask(ctx.depths, q.shape[2], q.dtype)
            parts = _flash_backward(
                grad[:, :, rows], *_slices(block, q, k, v), out[:, :, rows], lse[:, :, rows],
                0.0, block.causal, attn_mask=mask, scale=ctx.scale,
            )  # fmt: skip
            dq[:, :, rows] += parts[0]
            dk[:, :, columns] += parts[1].sum(1, keepdim=True)
            dv[:, :, columns] += parts[2].sum(1, keepdim=True)
        dsinks = None
        if sinks is not None:
            # A sink is a key whose value is zero: its score's gradient is its weight times minus the output's share.
            weight = (_per_head(sinks, lse) - lse).exp()
            dsinks = -(weight * (grad * out).sum(-1)).sum(-1).to(sinks.dtype).view(sinks.shape)
        return dq.view(query.shape), dk.transpose(0, 1), dv.transpose(0, 1), dsinks, None, None, None


def _blocks(segments: list[Segment], first: int, tokens: int) -> Iterator[Block]:
    """Yield the kernel calls of the queries that stand from ``first`` to ``tokens`` in the tree."""
    for it in segments:
        q0, q1, end = max(it.start, first), min(it.last, tokens), min(it.end, tokens)
        if q0 >= q1:
            continue
        if it.window:
            yield from _windowed_blocks(it, q0 - first, q1 - first, first)
            continue
        if it.start < q0:  # keys of an earlier piece of the tree
            yield Block(q0 - first, q1 - first, it.start, min(it.end, q0), causal=False)
        if q0 < end:
            yield Block(q0 - first, q1 - first, q0, end, causal=True)


def _blocks_of_rows(segments: list[Segment], rows: np.ndarray, first: int, tokens: int) -> Iterator[Block]:
    """Yield the kernel calls of the queries ``rows``, ascending and counted from ``first``; no window slides."""
    wanted = rows + first
    gaps = np.flatnonzero(np.diff(wanted) != 1)
    edges = np.unique(np.concatenate([wanted[:1], wanted[gaps] + 1, wanted[gaps + 1], wanted[-1:] + 1]))
    # Cut where wanted rows begin and end, so that of each segment all rows are wanted or none.
    cut = []
    for it in segments:
        inside = edges[slice(*np.searchsorted(edges, (it.start + 1, it.end)))].tolist()
        for start, end in pairwise([it.start, *inside, it.end]):
            cut.append(it._replace(start=start, end=end, depth=it.depth + start - it.start))
    for block in _blocks(cut, first, tokens):
        q0, q1 = np.searchsorted(rows, (block.q0, block.q1)).tolist()
        if q0 < q1:
            yield replace(block, q0=q0, q1=q1, causal=block.causal and bool(rows[q0] == block.q0))


def _windowed_blocks(it: Segment, q0: int, q1: int, first: int) -> Iterator[Block]:
    for begin in range(q0, q1, WINDOW_QUERIES):
        stop = min(begin + WINDOW_QUERIES, q1)
        # Depth grows by one a token within a segment; that of a descendant is at least that of the segment's end.
        shallowest = it.depth + min(begin + first, it.end) - it.start
        k0 = it.start + max(0, shallowest - it.window + 1 - it.depth)
        k1 = min(it.end, stop + first)
        if k0 < k1:
            yield Block(begin, stop, k0, k1, causal=False, window=it.window)


def _depths(segments: list[Segment], tokens: int) -> Tensor:
    """Return the depth of each of the first ``tokens`` tokens."""
    runs = [torch.arange(it.depth, it.depth + it.end - it.start) for it in segments]
    return torch.cat(runs)[:tokens]


def _grouped(states: Tensor, key_heads: int) -> Tensor:
    """(1, heads, tokens, size) -> (key heads, heads of a key head, tokens, size), so that no key is repeated."""
    return states[0].unflatten(0, (key_heads, -1))


def _slices(block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    columns, heads = slice(block.k0, block.k1), (-1, q.shape[1], -1, -1)
    return q[:, :, block.q0 : block.q1], k[:, :, columns].expand(heads), v[:, :, columns].expand(heads)


def _per_head(sinks: Tensor, lse: Tensor) -> Tensor:
    return sinks.to(lse.dtype).view(*lse.shape[:2], 1)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a partial result to ``out`` and ``lse``, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(part.to(out.dtype), (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


AttentionInterface.register(ATTENTION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
