"""Where the tokens of a tree find what came before them: index arithmetic, done once per forward pass.

Tokens are in depth-first order, so a token's predecessor is the one before it in the row, except at the start of a node, where
it is the last token of the parent. A piece is a range of tokens that is computed at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from art_core.types import TokenTree

NONE = -1
"""In place of a predecessor, where a path begins."""


class TreePlan:
    """The predecessors of all tokens of a tree."""

    def __init__(self, tree: TokenTree) -> None:
        starts, parents = tree.node_starts[:-1], tree.node_parents
        self.before = np.arange(-1, tree.num_tokens - 1, dtype=np.int64)
        """(tokens,): each token's predecessor, or NONE."""
        self.before[starts] = np.where(parents >= 0, tree.node_starts[parents + 1] - 1, NONE)
        followers = np.bincount(self.before + 1, minlength=tree.num_tokens + 1)[1:]
        self.heads = starts[(parents < 0) | (self.before[starts] != starts - 1) | (followers[starts - 1] > 1)]
        """The first token of each path, and those after a branch."""

    def open_ends(self, at: int) -> np.ndarray:
        """Return the tokens before ``at`` that a token from ``at`` on follows directly, ascending."""
        later = self.before[at:]
        return np.unique(later[(later >= 0) & (later < at)])

    def history(self, tokens: np.ndarray, length: int) -> np.ndarray:
        """(tokens,) -> (tokens, length): the predecessors of each, the nearest last."""
        columns = np.empty((len(tokens), length), dtype=np.int64)
        for column in range(length - 1, -1, -1):
            tokens = columns[:, column] = np.where(tokens >= 0, self.before[tokens], NONE)
        return columns

    def still_read(self, at: int, width: int) -> np.ndarray:
        """Return the tokens before ``at`` that a convolution of ``width`` reads at tokens from ``at`` on, ascending."""
        ends = self.open_ends(at)
        tokens = np.unique(np.concatenate([ends, self.history(ends, max(0, width - 2)).ravel()]))
        return tokens[tokens >= 0]


class Layout(NamedTuple):
    """The inputs of a piece as one row, in which an ordinary causal convolution computes every token.

    Each segment stands behind the inputs that precede it on its path. Columns count a column of zeros, then the inputs of earlier
    pieces that are still read, then the piece's own.
    """

    columns: Tensor
    """(row,): the column at each place of the row."""
    places: Tensor
    """(tokens,): each token's place in the row."""
    passed_on: Tensor
    """The columns that later pieces read."""


class Chunks(NamedTuple):
    """The tokens of a piece in chunks, sorted by level. A chunk has no branch inside and continues one state.

    Those of level 0 continue a state of an earlier piece, or none; all others continue a chunk of the level before.
    """

    tokens: Tensor
    """(chunks, size): positions in the piece; one beyond its last for padding."""
    parents: list[Tensor]
    """Per level, (its chunks,): the state that each continues. At level 0, 0 is the zero state and 1 + n the n-th of earlier
    pieces; at others, a number is a chunk's place within the level before."""
    places: Tensor
    """(tokens,): each token's place in ``tokens``, flattened."""
    passed_on: Tensor
    """The states that later pieces continue, as places in: the zero state, those of earlier pieces, those of all chunks."""


@dataclass(eq=False)
class Piece:
    """The plan of one piece. It reaches the layers as ``seq_idx``, their argument for sequences packed into a row."""

    plan: TreePlan
    start: int
    stop: int
    device: torch.device
    states: Tensor | None = None
    """Of earlier pieces, in the layer that is being computed; set by its cache."""
    calls: Counter[str] = field(default_factory=Counter)
    """How often each function has followed the tree in this pass."""
    _made: dict[tuple[str, int], Any] = field(default_factory=dict)

    def layout(self, width: int) -> Layout:
        """Return the row for a convolution of ``width``."""
        return self._once("layout", width, self._layout)

    def chunks(self, size: int) -> Chunks:
        """Return the chunks of at most ``size`` tokens."""
        return self._once("chunks", size, self._chunks)

    def _once(self, kind: str, size: int, make: Callable[[int], Any]) -> Any:
        """Return what ``make`` returns, made for the first layer and kept for the others."""
        if (kind, size) not in self._made:
            self._made[kind, size] = make(size)
        return self._made[kind, size]

    @cached_property
    def segments(self) -> list[tuple[int, int]]:
        """Ranges of tokens without a branch inside."""
        heads = self.plan.heads
        inside = heads[(self.start < heads) & (heads < self.stop)].tolist()
        return list(pairwise([self.start, *inside, self.stop]))

    def _layout(self, width: int) -> Layout:
        earlier = self.plan.still_read(self.start, width)

        def column(tokens: np.ndarray) -> np.ndarray:
            own, passed_on = 1 + len(earlier) + tokens - self.start, 1 + np.searchsorted(earlier, tokens)
            return np.where(tokens >= self.start, own, np.where(tokens >= 0, passed_on, 0))

        starts, stops = np.array(self.segments, dtype=np.int64).T
        histories = column(self.plan.history(starts, width - 1))
        parts = [
            part
            for start, stop, history in zip(starts, stops, histories, strict=True)
            for part in (history, column(np.arange(start, stop)))
        ]
        shift = (width - 1) * np.arange(1, len(starts) + 1)
        places = np.arange(self.stop - self.start) + np.repeat(shift, stops - starts)
        passed_on = column(self.plan.still_read(self.stop, width))
        return Layout(self._tensor(np.concatenate(parts)), self._tensor(places), self._tensor(passed_on))

    def _chunks(self, size: int) -> Chunks:
        cuts = np.array(
            [(at, min(at + size, stop)) for start, stop in self.segments for at in range(start, stop, size)]
        )
        at_end = {int(stop) - 1: number for number, stop in enumerate(cuts[:, 1])}
        earlier = {int(end): 1 + number for number, end in enumerate(self.plan.open_ends(self.start))}
        before = self.plan.before[cuts[:, 0]].tolist()
        levels = np.zeros(len(cuts), dtype=np.int64)
        for number, token in enumerate(before):
            levels[number] = levels[at_end[token]] + 1 if token in at_end else 0
        order = np.argsort(levels, kind="stable")
        rank = np.argsort(order)
        bounds = np.searchsorted(levels[order], np.arange(levels.max() + 2)).tolist()
        parents = [np.array([earlier.get(before[number], 0) for number in order[: bounds[1]]])]
        for previous, (low, high) in zip(bounds[:-2], pairwise(bounds[1:]), strict=True):
            parents.append(np.array([rank[at_end[before[number]]] for number in order[low:high]]) - previous)
        tokens = cuts[order, :1] + np.arange(size)
        inside = tokens < cuts[order, 1:]
        places = np.empty(self.stop - self.start, dtype=np.int64)
        places[tokens[inside] - self.start] = np.flatnonzero(inside)
        ends = [
            1 + len(earlier) + rank[at_end[end]] if end >= self.start else earlier[end]
            for end in self.plan.open_ends(self.stop).tolist()
        ]
        return Chunks(
            tokens=self._tensor(np.where(inside, tokens, self.stop) - self.start),
            parents=[self._tensor(numbers) for numbers in parents],
            places=self._tensor(places),
            passed_on=self._tensor(np.array(ends, dtype=np.int64)),
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device)
