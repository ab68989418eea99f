"""Token trees as rows: a server computes sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from art_core.learner.tree_forward import paths
from art_core.types import TokenTree


@dataclass(frozen=True)
class Row:
    """A path of the tree, from its root to the last target that is computed on it."""

    ids: np.ndarray
    """(tokens,) int64."""
    targets: np.ndarray
    """Numbers of the targets that are computed on it, among the trained targets of the tree."""
    places: np.ndarray
    """Where they are: indices into ``ids[1:]``. Calls that sampled the same token after the same ones share a place."""

    def logprobs(self, logprobs: np.ndarray) -> np.ndarray:
        """Return (tokens - 1,) float32: the logprob at each place, else 0. ``logprobs``: one per trained target."""
        row = self._zeros()
        row[self.places] = logprobs[self.targets]
        return row

    def sums(self, numbers: np.ndarray) -> np.ndarray:
        """Return (tokens - 1,) float32: the sum over the targets of each place, else 0. ``numbers``: one per trained target."""
        row = self._zeros()
        np.add.at(row, self.places, numbers[self.targets])
        return row

    def _zeros(self) -> np.ndarray:
        return np.zeros(len(self.ids) - 1, dtype=np.float32)


def rows_of(tree: TokenTree) -> list[Row]:
    """Return rows that together hold every trained target once."""
    trained = np.flatnonzero(tree.weights)
    number = np.full(tree.num_targets, -1)
    number[trained] = np.arange(len(trained))
    rows = []
    for path, members in paths(tree, trained):
        places = np.searchsorted(path, tree.target_tokens[members])
        rows.append(Row(tree.tokens[path[: places.max() + 1]], number[members], places - 1))
    return rows
