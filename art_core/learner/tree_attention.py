"""Attention over a token tree without a mask: one call of the CPU's flash kernel for each segment of the tree.

A segment is a stretch of tokens without a branch inside. In depth-first order its descendants follow it directly, so the
queries that see its keys are one slice: its own tokens causally, its descendants' fully. That is one causal kernel call with
more queries than keys. The partial results of a token's ancestors are merged by their log-sum-exp, which is exact (Milakov
and Gimelshein, arXiv 1805.02867). The kernel's own backward pass, called with the merged result, yields the segment's part
of the gradient, because all it needs of the softmax is the normaliser (Dao, FlashAttention-2, arXiv 2307.08691, section
3.1.2). The tree is passed as a small integer tensor in place of the mask.

The last decoder layer can compute only the rows that predict a target: only the LM head reads its output, and only there. It
still projects every token; attention and MLP, which cost most, are computed for these rows alone, the others are meaningless.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from art_core.runtime.cpu import attention_of

ATTENTION = "art_tree"  # the name under which models find ``attend``
WINDOW_QUERIES = 512
"""Queries per kernel call with a sliding window: its mask has this many rows and little more than a window's columns."""
SMALL_GAP = 16
"""Rows between two needed ones that are computed too: attention makes a kernel call per stretch of rows and one per gap, so
a few extra rows cost less than a gap. Measured with gaps of 3 to 100 rows between stretches of 1 to 100: 16 and 32 are never
slower than computing all rows, 0 takes up to 2.5 times as long, and 64 gains nothing if gaps are 20 rows."""
_needed: ContextVar[tuple[torch.nn.Module | None, Tensor]] = ContextVar("needed", default=(None, torch.empty(0)))
"""The attention module that computes only some rows, and these rows; other threads that use it compute all rows."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Segment(NamedTuple):
    """One row of the tensor that encodes the tree; positions are those of the whole tree."""

    start: int
    end: int
    last: int  # end of its descendants
    depth: int  # of its first token
    window: int  # sliding window, a distance in depth; 0 for none


@dataclass(frozen=True)
class Block:
    """One kernel call: queries ``q0`` to ``q1`` attend to keys ``k0`` to ``k1``."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool
    """Query i sees keys 0 to i of the block; otherwise every query sees every key that isn't masked."""
    window: int = 0
    """0 if no mask is needed."""

    def mask(self, depths: Tensor, queries: int, dtype: torch.dtype) -> Tensor | None:
        """Return the mask added to the scores, (1, 1, q1 - q0, k1 - k0), or None; ``depths`` are those of all tokens."""
        if not self.window:
            return None
        first = len(depths) - queries
        rows = torch.arange(first + self.q0, first + self.q1)[:, None]
        columns = torch.arange(self.k0, self.k1)
        seen = (columns <= rows) & (depths[rows] - depths[columns] < self.window)
        # Finite, because a row may see none of these keys; its partial result then gets no weight in the merge.
        return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[None, None]


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Implement transformers' attention interface; the queries are the last of the keys' tokens.

    ``attention_mask`` encodes a tree: (1, 1, segments, 5) int64, one ``Segment`` per row. With any other mask this is
    transformers' own SDPA attention, so a model left at ``ATTENTION`` still computes plain rows.
    """
    plain = attention_mask is None or attention_mask.dtype != torch.int64
    if softcap is not None or (plain and s_aux is not None):
        raise NotImplementedError(
            f"{ATTENTION} supports no soft cap, and sinks along a tree only; call model.set_attn_implementation('eager')"
        )
    if plain:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout:
        raise NotImplementedError(
            "attention along a tree supports no dropout; set attention_dropout to 0 or call model.eval()"
        )
    width = value.shape[-1]
    if width < key.shape[-1]:  # multi-head latent attention; the kernel needs values as wide as keys
        value = pad(value, (0, key.shape[-1] - width))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    segments = [Segment(*row) for row in attention_mask[0, 0].tolist()]
    queries, tokens = query.shape[2], key.shape[2]
    first = tokens - queries
    depths = torch.cat([torch.arange(s.depth, s.depth + s.end - s.start) for s in segments])[:tokens]
    needed_by, rows = _needed.get()
    if needed_by is not module or any(segment.window for segment in segments):
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
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, scale: float, blocks: list[Block],
        depths: Tensor,
    ) -> Tensor:  # fmt: skip
        q, k, v = _grouped(query, key.shape[1]), key[0].unsqueeze(1), value[0].unsqueeze(1)
        precise = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=precise)
        lse = torch.full(q.shape[:-1], float("-inf"), dtype=precise)
        for block in blocks:
            mask = block.mask(depths, q.shape[2], q.dtype)
            with attention_of(block.q1 - block.q0):
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
        dq, dk, dv = (torch.zeros(states.shape, dtype=states.dtype) for states in (q, k, v))
        for block in ctx.blocks:
            rows, columns = slice(block.q0, block.q1), slice(block.k0, block.k1)
            mask = block.mask(ctx.depths, q.shape[2], q.dtype)
            with attention_of(block.q1 - block.q0):
                parts = _flash_backward(
                    grad[:, :, rows], *_slices(block, q, k, v), out[:, :, rows], lse[:, :, rows],
                    0.0, block.causal, attn_mask=mask, scale=ctx.scale,
                )  # fmt: skip
            dq[:, :, rows] += parts[0]
            dk[:, :, columns] += parts[1].sum(1, keepdim=True)
            dv[:, :, columns] += parts[2].sum(1, keepdim=True)
        dsinks = None
        if sinks is not None:
            # A sink is a key with value zero, so its score's gradient is minus its weight times the output's share.
            weight = (_per_head(sinks, lse) - lse).exp()
            dsinks = -(weight * (grad * out).sum(-1)).sum(-1).to(sinks.dtype).view(sinks.shape)
        return dq.view(query.shape), dk.transpose(0, 1), dv.transpose(0, 1), dsinks, None, None, None


def _blocks(segments: list[Segment], first: int, tokens: int) -> Iterator[Block]:
    """Yield the kernel calls for the queries at positions ``first`` to ``tokens`` of the tree."""
    for segment in segments:
        q0, q1, end = max(segment.start, first), min(segment.last, tokens), min(segment.end, tokens)
        if q0 >= q1:
            continue
        if segment.window:
            yield from _windowed_blocks(segment, q0 - first, q1 - first, first)
            continue
        if segment.start < q0:  # keys of an earlier piece of the tree
            yield Block(q0 - first, q1 - first, segment.start, min(segment.end, q0), causal=False)
        if q0 < end:
            yield Block(q0 - first, q1 - first, q0, end, causal=True)


def _blocks_of_rows(segments: list[Segment], rows: np.ndarray, first: int, tokens: int) -> Iterator[Block]:
    """Yield the kernel calls for the queries ``rows``, ascending and counted from ``first``, without a sliding window."""
    needed = rows + first
    gaps = np.flatnonzero(np.diff(needed) != 1)
    edges = np.unique(np.concatenate([needed[:1], needed[gaps] + 1, needed[gaps + 1], needed[-1:] + 1]))
    # Cut at the borders of needed rows, so that each segment's rows are all needed or none is.
    cut = []
    for segment in segments:
        inside = edges[slice(*np.searchsorted(edges, (segment.start + 1, segment.end)))].tolist()
        for start, end in pairwise([segment.start, *inside, segment.end]):
            cut.append(segment._replace(start=start, end=end, depth=segment.depth + start - segment.start))
    for block in _blocks(cut, first, tokens):
        q0, q1 = np.searchsorted(rows, (block.q0, block.q1)).tolist()
        if q0 < q1:
            yield replace(block, q0=q0, q1=q1, causal=block.causal and bool(rows[q0] == block.q0))


def _windowed_blocks(segment: Segment, q0: int, q1: int, first: int) -> Iterator[Block]:
    for begin in range(q0, q1, WINDOW_QUERIES):
        stop = min(begin + WINDOW_QUERIES, q1)
        # Depth grows by one per token within a segment; a descendant is at least as deep as the segment's end.
        shallowest = segment.depth + min(begin + first, segment.end) - segment.start
        k0 = segment.start + max(0, shallowest - segment.window + 1 - segment.depth)
        k1 = min(segment.end, stop + first)
        if k0 < k1:
            yield Block(begin, stop, k0, k1, causal=False, window=segment.window)


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


@contextmanager
def only_rows(base: PreTrainedModel, rows: Tensor) -> Iterator[None]:
    """Let the last layer of ``base`` compute only ``rows``, and those in small gaps between them.

    ``rows``: (rows,) int64, ascending positions in the input. Raises AttributeError unless the layer consists of
    ``self_attn`` and ``mlp``.
    """
    layer = base.get_decoder().layers[-1]
    rows = filled(rows)
    mine = layer.self_attn, rows
    tokens = 0

    def select(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        nonlocal tokens
        if _needed.get() is not mine:
            return None
        tokens = inputs[0].shape[1]
        return inputs[0].index_select(1, rows), *inputs[1:]

    def restore(_: torch.nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        return spread(output, 1, rows, tokens) if _needed.get() is mine else None

    with layer.mlp.register_forward_pre_hook(select), layer.mlp.register_forward_hook(restore):
        token = _needed.set(mine)
        try:
            yield
        finally:
            _needed.reset(token)


def filled(rows: Tensor) -> Tensor:
    """Return the distinct ascending ``rows``, with the rows of gaps of at most ``SMALL_GAP``."""
    included = torch.zeros(int(rows[-1]) + 1 if len(rows) else 0, dtype=torch.bool)
    included[rows] = True
    for start, gap in zip((rows[:-1] + 1).tolist(), (rows.diff() - 1).tolist(), strict=True):
        if 0 < gap <= SMALL_GAP:
            included[start : start + gap] = True
    return included.nonzero()[:, 0]


def spread(tensor: Tensor, dimension: int, rows: Tensor, length: int) -> Tensor:
    """Return zeros of ``length`` along ``dimension``, with the slices of ``tensor`` at ``rows``."""
    shape = list(tensor.shape)
    shape[dimension] = length
    return tensor.new_zeros(shape).index_copy_(dimension, rows, tensor)


AttentionInterface.register(ATTENTION, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
