"""Attention of decoding rows that share a prefix: its keys and values are read once for all of them, not once per row.

The rollouts of a group share their whole prompt, and a step on a CPU takes longer to read keys and values than to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""Returns the attention and, which torch's public function doesn't, the log of the sum of the exponentials."""
SHORTEST = 128
"""Tokens from which on a prefix is shared. Below, the products are too small to pay."""
LONGEST_REST = 0.5
"""A row's rest may be this share of the prefix. Rests are copied, which takes longer than reading them in place."""


@dataclass(frozen=True)
class Shared:
    """Rows whose first ``length`` stored tokens are the same."""

    rows: tuple[int, ...]
    length: int


def find_shared(history: np.ndarray, lengths: np.ndarray) -> list[Shared]:
    """Return disjoint groups of rows with a common prefix that leave as few tokens to read as possible.

    ``history`` (rows, capacity) has the rows' tokens; the first ``lengths`` (rows,) of each are stored.
    """
    # Sorted, rows with a common prefix are neighbours, so they share what all neighbours among them do.
    order = sorted(range(len(lengths)), key=lambda row: history[row, : lengths[row]].tobytes())
    common = [_common(history, lengths, *pair) for pair in pairwise(order)]

    @cache
    def divide(first: int, end: int, outer: int) -> _Division:
        """Divide ``order[first:end]``, of which each row may join a group that shares its first ``outer`` tokens."""
        if end - first < 2:
            return _Division(outer * (end - first), tuple(order[first:end]))
        length = min(common[first : end - 1])
        cuts = [first, *(at + 1 for at in range(first, end - 1) if common[at] == length), end]
        parts = list(pairwise(cuts))
        apart = _joined([divide(*part, outer) for part in parts])
        if length < SHORTEST:
            return apart
        together = _joined([divide(*part, length) for part in parts])
        if together.saved - length <= apart.saved:
            return apart
        group = Shared(tuple(sorted(together.outer)), length)
        return _Division(together.saved - length, (), (*together.groups, group))

    return list(divide(0, len(order), 0).groups)


class _Division(NamedTuple):
    """How some rows are divided."""

    saved: int
    """Tokens that needn't be read again."""
    outer: tuple[int, ...]
    """Rows that are in none of ``groups``; they join the outer group if there is one."""
    groups: tuple[Shared, ...] = ()


def _joined(parts: Sequence[_Division]) -> _Division:
    saved, outer, groups = zip(*parts, strict=True)
    return _Division(sum(saved), tuple(chain(*outer)), tuple(chain(*groups)))


def _common(history: np.ndarray, lengths: np.ndarray, a: int, b: int) -> int:
    width = int(min(lengths[a], lengths[b]))
    differs = history[a, :width] != history[b, :width]
    return int(differs.argmax()) if differs.any() else width


class SharedAttention:
    """One step's attention of the rows in ``groups``, the same in all layers but for the layer's keys and values."""

    def __init__(self, groups: Sequence[Shared], positions: Tensor, layers: int, capacity: int) -> None:
        self.groups, self.capacity = groups, capacity
        self.rows = torch.tensor([row for group in groups for row in group.rows])
        starts = torch.tensor([group.length for group in groups for _ in group.rows])
        rests = (positions[self.rows] + 1 - starts)[:, None]
        offsets = torch.arange(int(rests.max()))
        # What a row doesn't have is read from its last token, and masked.
        self.rest = (self.rows * layers * capacity + starts)[:, None] + torch.minimum(offsets, rests - 1)
        self.mask = torch.zeros(self.rest.shape).masked_fill_(offsets >= rests, float("-inf"))[:, None, None]

    def __call__(self, query: Tensor, stored: Sequence[Tensor], layer: int, scale: float | None) -> Tensor:
        """Return (rows, key heads, queries, head size) for ``query`` of that shape; rows are in the order of ``self.rows``.

        ``stored`` are keys and values, each (rows, layers, capacity, key heads * head size).
        """
        count, heads, queries, size = query.shape
        flat = (self.rest + layer * self.capacity).flatten()
        rests = [
            each.view(-1, each.shape[-1]).index_select(0, flat).view(count, -1, heads, size).transpose(1, 2)
            for each in stored
        ]
        mask = self.mask.to(query.dtype).expand(-1, heads, queries, -1)
        rest, rest_lse = _flash(query, *rests, 0.0, False, attn_mask=mask, scale=scale)
        by_head = query.transpose(0, 1)[None]
        parts, end = [], 0
        for group in self.groups:
            begin, end = end, end + len(group.rows)
            prefix = [
                each[group.rows[0], layer, : group.length].unflatten(-1, (heads, -1)).transpose(0, 1)[None]
                for each in stored
            ]
            rows = by_head[:, :, begin:end].flatten(2, 3)
            parts.append(_flash(rows, *prefix, 0.0, False, attn_mask=None, scale=scale))
        mixed = torch.cat([part for part, _ in parts], 2).view(heads, count, queries, size).transpose(0, 1)
        lse = torch.cat([part for _, part in parts], 2).view(heads, count, queries).transpose(0, 1)
        # Softmax over both: each part weighs as much as the sum of its exponentials.
        return torch.lerp(mixed, rest, torch.sigmoid(rest_lse - lse)[..., None].to(query.dtype))
