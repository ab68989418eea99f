"""The baselines: whole rows through a transformers model with full logits, sharing nothing between rows.

Independent of art_core's learner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from art_core.types import TokenTree


@dataclass(frozen=True)
class Row:
    """Tokens to compute together, and which of them to train."""

    ids: tuple[int, ...]
    trained: np.ndarray
    """(len(ids),) bool."""
    advantage: float = 1.0


def micro_batches(rows: Sequence[Row], size: int) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def padded_area(rows: Sequence[Row], size: int) -> int:
    """Return the tokens of micro-batches of ``size`` rows, padding included."""
    return sum(len(batch) * max(len(row.ids) for row in batch) for batch in micro_batches(rows, size))


def padded(values: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Return (rows, longest), padded with zeros on the right."""
    out = torch.zeros(len(values), max(map(len, values)), dtype=dtype)
    for number, row in enumerate(values):
        out[number, : len(row)] = torch.as_tensor(np.asarray(row), dtype=dtype)
    return out.to(device)


def row_logprobs(model: torch.nn.Module, ids: Sequence[Sequence[int]]) -> Tensor:
    """Return (rows, longest - 1): the logprob of every token but the first, given those before it; one forward pass."""
    device = next(model.parameters()).device
    tokens = padded(ids, device)
    mask = padded([[1] * len(row) for row in ids], device) if len(ids) > 1 else None
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
    chosen = logits.gather(-1, tokens[:, 1:, None])[..., 0]
    return chosen - logits.logsumexp(-1)


def rows_backward(model: torch.nn.Module, rows: Sequence[Row], size: int, trained: int) -> None:
    """Add the gradient of the policy gradient at ratio 1: the mean over ``trained`` tokens of -advantage * ratio."""
    for batch in micro_batches(rows, size):
        new = row_logprobs(model, [row.ids for row in batch])
        weights = padded([row.trained * row.advantage for row in batch], new.device, new.dtype)[:, 1:]
        objective(new, weights, trained).backward()


def objective(new: Tensor, weights: Tensor, trained: int) -> Tensor:
    """Return the mean over ``trained`` tokens of -weight * ratio, with a ratio of 1; ``new``, ``weights``: (targets, ...)."""
    return -((new - new.detach()).exp() * weights.to(new.dtype)).sum() / trained


def dense_logits(model: torch.nn.Module, ids: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
    """Return (tokens, vocabulary) for one row: ``ids``, ``positions``: (1, tokens); ``seen``: (tokens, tokens) bool."""
    dtype = next(model.parameters()).dtype
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
    return model(input_ids=ids, position_ids=positions, attention_mask=mask[None, None], use_cache=False).logits[0]


def dense_tree_logprobs(model: torch.nn.Module, tree: TokenTree) -> Tensor:
    """Return the logprobs of the trained targets by the naive tree: one row, a (tokens, tokens) mask and full logits."""
    device = next(model.parameters()).device
    ids, positions = _tensor(tree.tokens, device)[None], _tensor(tree.depths, device)[None]
    logits = dense_logits(model, ids, positions, _ancestors(tree).to(device))
    trained = np.flatnonzero(tree.weights)
    sampled = _tensor(tree.tokens[tree.target_tokens[trained]], device)
    contexts = _tensor(tree.target_contexts[trained], device)
    return logits[contexts].gather(-1, sampled[:, None])[:, 0] - logits.logsumexp(-1)[contexts]


def call_logprobs(model: torch.nn.Module, tree: TokenTree, size: int = 1) -> Tensor:
    """Return the logprobs of the trained targets in the tree's order, every call computed in a row of its own."""
    parts = list(call_batches(model, tree, size))
    order = np.argsort(np.concatenate([places for places, _ in parts]), kind="stable")
    return torch.cat([logprobs for _, logprobs in parts])[_tensor(order, parts[0][1].device)]


def call_batches(model: torch.nn.Module, tree: TokenTree, size: int = 1) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield logprobs of trained targets with their places among them; ``size`` calls are padded into one forward pass.

    Shortest calls first. Each batch can run backward before the next is computed.
    """
    device = next(model.parameters()).device
    trained = np.flatnonzero(tree.weights)
    members = [np.flatnonzero(tree.call[trained] == call) for call in np.unique(tree.call[trained])]
    ends = [int(tree.target_tokens[trained[places[-1]]]) for places in members]
    order = np.argsort(tree.depths[ends], kind="stable")
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        paths = [tree.tokens[path_to(tree, ends[number])] for number in batch]
        mask = padded([np.ones(len(path)) for path in paths], device) if len(paths) > 1 else None
        logits = model(input_ids=padded(paths, device), attention_mask=mask, use_cache=False).logits
        logprobs = [_of_targets(logits[row], tree, trained[members[number]]) for row, number in enumerate(batch)]
        yield np.concatenate([members[number] for number in batch]), torch.cat(logprobs)


def _of_targets(logits: Tensor, tree: TokenTree, targets: np.ndarray) -> Tensor:
    rows = logits[_tensor(tree.depths[tree.target_contexts[targets]], logits.device)].float()
    scores = rows / _tensor(tree.temperatures[targets], logits.device)[:, None]
    sampled = _tensor(tree.tokens[tree.target_tokens[targets]], logits.device)
    return scores.gather(-1, sampled[:, None])[:, 0] - scores.logsumexp(-1)


def path_to(tree: TokenTree, token: int) -> np.ndarray:
    """Return the indices of the tokens on the path that ends with ``token``."""
    node = int(np.searchsorted(tree.node_starts, token, side="right")) - 1
    pieces = [np.arange(tree.node_starts[node], token + 1)]
    while (node := int(tree.node_parents[node])) >= 0:
        pieces.append(np.arange(tree.node_starts[node], tree.node_starts[node + 1]))
    return np.concatenate(pieces[::-1])


def call_tokens(tree: TokenTree) -> int:
    """Return the tokens of all calls with trained targets, each call in a row of its own."""
    trained = np.flatnonzero(tree.weights)
    last = {int(call): int(target) for call, target in zip(tree.call[trained], trained, strict=True)}
    return int(sum(tree.depths[tree.target_tokens[target]] + 1 for target in last.values()))


def path_tokens(tree: TokenTree) -> int:
    """Return the tokens of all root-to-leaf paths."""
    leaves = set(range(len(tree.node_parents))) - set(tree.node_parents.tolist())
    return int(sum(tree.depths[tree.node_starts[leaf + 1] - 1] + 1 for leaf in leaves))


def _ancestors(tree: TokenTree) -> Tensor:
    """Return (tokens, tokens) bool: whether the row's token sees the column's."""
    seen = torch.zeros(tree.num_tokens, tree.num_tokens, dtype=torch.bool)
    for node, parent in enumerate(tree.node_parents):
        start, end = int(tree.node_starts[node]), int(tree.node_starts[node + 1])
        if parent >= 0:
            seen[start:end] = seen[int(tree.node_starts[parent + 1]) - 1]
        seen[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
    return seen


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
