"""Token trees -> passes: trees that are computed together, as one forest. Knows nothing about models or
losses.

A forest is a tree with several roots, so nothing is padded: the tokens of the passes are the trees' unique tokens, whatever
the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from art_core.types import TokenTree

NUMBERED = {"target_tokens": "tokens", "target_contexts": "tokens", "trajectory": "trajectory", "call": "call"}
"""Arrays of numbers that count something within their own tree, and what they count."""


def pack(trees: Sequence[TokenTree], max_tokens: int) -> list[TokenTree]:
    """Return forests of at most ``max_tokens`` tokens that hold ``trees``, each whole; a larger tree is one by itself.

    The largest are placed first, each in the first forest with room (first-fit decreasing).
    """
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(trees)), key=lambda i: -trees[i].num_tokens):
        size = trees[index].num_tokens
        place = next((i for i, room in enumerate(free) if size <= room), None)
        if place is None:
            bins.append([index])
            free.append(max_tokens - size)
        else:
            bins[place].append(index)
            free[place] -= size
    return [join([trees[index] for index in sorted(members)]) for members in bins]


def join(trees: Sequence[TokenTree]) -> TokenTree:
    """Return the trees as one forest; trajectories and calls are numbered on from tree to tree."""
    if len(trees) == 1:
        return trees[0]
    sizes = {
        "tokens": [tree.num_tokens for tree in trees],
        "nodes": [len(tree.node_parents) for tree in trees],
        "trajectory": [int(tree.trajectory.max(initial=-1)) + 1 for tree in trees],
        "call": [int(tree.call.max(initial=-1)) + 1 for tree in trees],
    }
    offsets = {name: np.cumsum([0, *size]) for name, size in sizes.items()}
    joined = {
        name: np.concatenate([getattr(tree, name) for tree in trees])
        for name in ("tokens", "depths", "old_logprobs", "temperatures", "weights", "advantages")
    }
    for name, counted in NUMBERED.items():
        pieces = zip(trees, offsets[counted], strict=False)
        joined[name] = np.concatenate([getattr(tree, name) + offset for tree, offset in pieces])
    starts = [tree.node_starts[:-1] + offset for tree, offset in zip(trees, offsets["tokens"], strict=False)]
    parents = [
        np.where(tree.node_parents < 0, -1, tree.node_parents + offset)
        for tree, offset in zip(trees, offsets["nodes"], strict=False)
    ]
    joined["node_starts"] = np.concatenate([*starts, offsets["tokens"][-1:]])
    joined["node_parents"] = np.concatenate(parents)
    return TokenTree(**joined)
