"""What a model's attention is told of a token tree: segments, a block mask, or a dense mask. Knows nothing about models.

A token sees its ancestors and itself. In depth-first order those of its descendants follow it without a gap, so token q
sees token k exactly where k <= q < (end of the subtree of k's node), and where a window slides, their depths differ by
less than the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from art_core.types import TokenTree

Backend = Literal["segments", "flex", "dense"]
"""``segments``: tree_attention.py, for CPUs; ``flex``: FlexAttention, for GPUs; ``dense``: a (tokens x tokens) mask."""
FLEX_BLOCK = 128
"""Tokens on either side of a block of FlexAttention's mask; its default."""


class TreeMask:
    """The masks of a tree, for any stretch of its tokens as queries and all tokens up to its end as keys.

    ``windows``: layer type -> sliding window in tokens, None where there is none.
    """

    def __init__(
        self,
        tree: TokenTree,
        windows: Mapping[str, int | None],
        backend: Backend,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        deepest = int(tree.depths.max(initial=0)) + 1
        # A window that no path outgrows hides nothing.
        self.windows = {kind: window if window and window < deepest else 0 for kind, window in windows.items()}
        self.make = {"segments": self._segments, "flex": self._flex, "dense": self._dense}[backend]
        self.segments = segments(tree)
        self.depths = tree.depths
        self.ends = np.repeat(_subtree_ends(tree), np.diff(tree.node_starts))
        """(tokens,): where the subtree of each token's node ends."""
        self.dtype, self.device = dtype, device

    def rows(self, start: int, stop: int) -> Any:
        """Return the mask of queries ``start`` to ``stop``; a dict by layer type where the model has several."""
        made = {window: self.make(start, stop, window) for window in set(self.windows.values())}
        masks = {kind: made[window] for kind, window in self.windows.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _segments(self, start: int, stop: int, window: int) -> Tensor:
        column = np.full((len(self.segments), 1), window, dtype=np.int64)
        return torch.from_numpy(np.concatenate([self.segments, column], axis=1))[None, None]

    def _dense(self, start: int, stop: int, window: int) -> Tensor:
        queries = torch.arange(start, stop, device=self.device)[:, None]
        keys = torch.arange(stop, device=self.device)
        depths, ends = self._on_device()
        seen = (keys <= queries) & (queries < ends[:stop])
        if window:
            seen &= depths[queries] - depths[:stop] < window
        # Additive and finite: eager attention adds the mask, and -inf makes NaN where a whole block is masked.
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, torch.finfo(self.dtype).min)[None, None]

    def _flex(self, start: int, stop: int, window: int) -> Any:
        from torch.nn.attention.flex_attention import BlockMask

        depths, ends = self._on_device()

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row = query + start
            seen = (key <= row) & (row < ends[key])
            return seen & (depths[row] - depths[key] < window) if window else seen

        partial, full = flex_blocks(self.depths, self.ends, start, stop, window)
        return BlockMask.from_kv_blocks(
            *(self._listed(partial)), *(self._listed(full)),
            BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=(stop - start, stop),
        )  # fmt: skip

    def _listed(self, blocks: np.ndarray) -> tuple[Tensor, Tensor]:
        """(query blocks, key blocks) bool -> how many key blocks each row has, and their numbers first in each row."""
        counts = torch.from_numpy(blocks.sum(1, dtype=np.int32)).to(self.device)
        numbers = torch.from_numpy(np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)).to(self.device)
        return counts[None, None], numbers[None, None]

    def _on_device(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.depths).to(self.device), torch.from_numpy(self.ends).to(self.device)


def segments(tree: TokenTree) -> np.ndarray:
    """Return (segments, 4) int64: start, end, end of the descendants, depth of the first token.

    A segment is a node together with its only child, and that child's only child, and so on.
    """
    children = np.bincount(tree.node_parents[tree.node_parents >= 0], minlength=len(tree.node_parents))
    starts, ends = tree.node_starts[:-1], tree.node_starts[1:]
    alone = (tree.node_parents >= 0) & (children[tree.node_parents] == 1)
    heads = np.flatnonzero(~alone)
    tails = np.append(heads[1:], len(starts)) - 1  # an only child follows its parent directly
    last = _subtree_ends(tree)[heads] if len(heads) else np.empty(0, np.int64)
    return np.stack([starts[heads], ends[tails], last, tree.depths[starts[heads]]], axis=1)


def flex_blocks(
    depths: np.ndarray, ends: np.ndarray, start: int, stop: int, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return which blocks of (queries ``start`` to ``stop``, keys 0 to ``stop``) are seen in part, and which wholly.

    Both (query blocks, key blocks) bool. A block may be called partly seen though nothing in it is: the mask decides.
    """
    size = FLEX_BLOCK
    row_first = np.arange(start, stop, size)
    row_last = np.minimum(row_first + size, stop) - 1
    key_first = np.arange(0, stop, size)
    key_last = np.minimum(key_first + size, stop) - 1
    longest, shortest = np.maximum.reduceat(ends[:stop], key_first), np.minimum.reduceat(ends[:stop], key_first)
    some = (key_first <= row_last[:, None]) & (row_first[:, None] < longest)
    whole = (key_last <= row_first[:, None]) & (row_last[:, None] < shortest)
    if window:
        row_deepest = np.maximum.reduceat(depths[start:stop], row_first - start)[:, None]
        row_shallowest = np.minimum.reduceat(depths[start:stop], row_first - start)[:, None]
        some &= row_shallowest - np.maximum.reduceat(depths[:stop], key_first) < window
        whole &= row_deepest - np.minimum.reduceat(depths[:stop], key_first) < window
    return some & ~whole, whole


def _subtree_ends(tree: TokenTree) -> np.ndarray:
    """Return, per node, where the tokens of its subtree end."""
    ends = tree.node_starts[1:].copy()
    for node in range(len(ends) - 1, -1, -1):
        parent = tree.node_parents[node]
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[node])
    return ends
