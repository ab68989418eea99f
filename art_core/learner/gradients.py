"""Token trees and a loss -> gradients and metrics, one pass at a time.

A pass computes a forest (a tree with several roots), so nothing is padded: passes compute unique tokens only, of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from art_core.learner.tree_forward import TreeOutputs
from art_core.runtime.memory import machine_memory
from art_core.types import Loss, LossInputs, TokenTree

MEMORY_SHARE = 0.25
"""Share of the memory for the activations of one pass if ``max_tokens_per_pass`` isn't set; the rest is for agents, engine,
optimizer and gradients."""
MOST_TOKENS = 65536  # most tokens in a pass, even if memory would hold more: longer passes aren't faster
LEAST_TOKENS = 256
"""Fewest tokens to which memory limits a pass; in smaller passes memory that doesn't grow with the tokens dominates."""

PER_TREE_INDICES = {"target_tokens": "tokens", "target_contexts": "tokens", "trajectory": "trajectory", "call": "call"}
"""Arrays of indices that count within their tree -> what they count."""


@dataclass(frozen=True)
class Totals:
    """Sums over all trees of a step, whichever process computes them; only trained targets count."""

    trajectories: int
    targets: int
    weight: float
    """Sum of the targets' weights."""
    tokens: int

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> Totals:
        return cls(
            trajectories=sum(len(np.unique(tree.trajectory[tree.weights != 0])) for tree in trees),
            targets=sum(int(np.count_nonzero(tree.weights)) for tree in trees),
            weight=float(sum(tree.weights.sum(dtype=np.float64) for tree in trees)),
            tokens=sum(tree.num_tokens for tree in trees),
        )


def with_targets(trees: Sequence[TokenTree]) -> list[TokenTree]:
    """Return the trees that have trained targets. Raises ValueError for an empty list."""
    if not trees:
        raise ValueError("step() got no token trees; don't call it if no group has anything to learn from")
    return [tree for tree in trees if tree.weights.any()]


def accumulate(
    passes: Sequence[TokenTree], totals: Totals, loss: Loss, *, forward: Callable[[TokenTree], TreeOutputs],
    reference: Callable[[TokenTree], Tensor | None], proximal: bool,
) -> dict[str, float]:  # fmt: skip
    """Add the gradients of the passes' shares of the loss to the parameters' gradients; return their shares of the metrics.

    Over all passes of a step, with the sums ``totals``, the shares add up to the step's metrics; for names that end with
    ``_max`` the maximum counts. ``forward`` computes the trained targets of a pass, ``reference`` their logprobs under the
    reference weights, or None. ``proximal`` passes the logprobs before the update to the loss.
    """
    metrics: dict[str, float] = {}
    for tree in passes:
        ref_logprobs = reference(tree)  # first: switching adapters off and on would break a graph in use
        outputs = forward(tree)
        inputs = _loss_inputs(tree, outputs.logprobs, ref_logprobs, totals, proximal)
        result = loss(inputs)
        result.loss.backward()
        means = dict(result.metrics)
        means["logprob_gap"] = (inputs.logprobs.detach() - inputs.old_logprobs).abs().mean().item()
        if outputs.entropy is not None:
            means["entropy"] = outputs.entropy.mean().item()
        share = len(inputs.weights) / totals.targets
        for name, value in means.items():
            if name.endswith("_max"):
                metrics[name] = max(metrics.get(name, value), value)
            else:
                metrics[name] = metrics.get(name, 0.0) + value * share
        metrics["loss"] = metrics.get("loss", 0.0) + result.loss.item()
    return metrics


def _loss_inputs(
    tree: TokenTree, logprobs: Tensor, reference: Tensor | None, totals: Totals, proximal: bool
) -> LossInputs:
    rows = np.flatnonzero(tree.weights)
    names = ("old_logprobs", "advantages", "weights", "trajectory", "call")
    return LossInputs(
        logprobs=logprobs,
        ref_logprobs=reference,
        **{name: torch.from_numpy(getattr(tree, name)[rows]).to(logprobs.device) for name in names},
        step_trajectories=totals.trajectories,
        step_weight=totals.weight,
        proximal_logprobs=logprobs.detach() if proximal else None,
    )


def pack(trees: Sequence[TokenTree], max_tokens: int) -> list[TokenTree]:
    """Return forests of at most ``max_tokens`` tokens that hold ``trees`` uncut; a larger tree is a forest by itself.

    First-fit decreasing: the largest trees are placed first, each in the first forest with room.
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
    """Return the trees as one forest; trajectories and calls are numbered consecutively."""
    if len(trees) == 1:
        return trees[0]
    sizes = {
        "tokens": [tree.num_tokens for tree in trees],
        "nodes": [len(tree.node_parents) for tree in trees],
        "trajectory": [int(tree.trajectory.max(initial=-1)) + 1 for tree in trees],
        "call": [int(tree.call.max(initial=-1)) + 1 for tree in trees],
    }
    offsets = {name: np.cumsum([0, *size])[:-1] for name, size in sizes.items()}
    joined = {
        name: np.concatenate([getattr(tree, name) for tree in trees])
        for name in ("tokens", "depths", "old_logprobs", "temperatures", "weights", "advantages")
    }
    for name, counted in PER_TREE_INDICES.items():
        pieces = zip(trees, offsets[counted], strict=True)
        joined[name] = np.concatenate([getattr(tree, name) + offset for tree, offset in pieces])
    starts = [tree.node_starts[:-1] + offset for tree, offset in zip(trees, offsets["tokens"], strict=True)]
    nodes = zip(trees, offsets["nodes"], strict=True)
    parents = [np.where(tree.node_parents < 0, -1, tree.node_parents + offset) for tree, offset in nodes]
    joined["node_starts"] = np.concatenate([*starts, [sum(sizes["tokens"])]])
    joined["node_parents"] = np.concatenate(parents)
    return TokenTree(**joined)


class MeasuredForward:
    """A forward pass that measures the memory kept for the backward pass.

    ``ratio`` is that memory over its estimate, for the largest tree so far of at most ``max_tokens``, or 0 before the first.
    Larger trees are computed in pieces that keep nothing, so they aren't measured.

    The measurement counts tensors instead of reading the process's peak memory, which includes other threads and differs
    between runs. Passes must be the same in every run with the same seed and after every resume, because their borders
    show in the last bits of the gradients.
    """

    def __init__(self, model: PreTrainedModel, forward: Callable[[TokenTree], TreeOutputs], max_tokens: int) -> None:
        self._model, self._forward, self._max_tokens = model, forward, max_tokens
        self._largest = LEAST_TOKENS - 1
        self.ratio = 0.0

    def __call__(self, tree: TokenTree) -> TreeOutputs:
        if not self._largest < tree.num_tokens <= self._max_tokens:
            return self._forward(tree)
        outputs, kept_bytes = _with_kept_bytes(self._model, lambda: self._forward(tree))
        self._largest, self.ratio = tree.num_tokens, kept_bytes / tree.num_tokens / token_bytes(self._model)
        return outputs


def _with_kept_bytes(model: PreTrainedModel, forward: Callable[[], TreeOutputs]) -> tuple[TreeOutputs, int]:
    """Return the result of ``forward`` and the bytes that stay allocated for its backward pass."""
    if model.device.type == "cuda":
        before = torch.cuda.memory_allocated(model.device)
        outputs = forward()
        return outputs, torch.cuda.memory_allocated(model.device) - before
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()  # once for all views
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        outputs = forward()
    return outputs, sum(sizes.values())


def token_bytes(model: PreTrainedModel) -> int:
    """Return the estimated bytes of activations per token: dense transformer layers keep for their backward pass about 18
    vectors of the hidden size and 6 of the feed-forward size each."""
    config = model.config.get_text_config()
    width = 18 * config.hidden_size + 6 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return config.num_hidden_layers * width * model.dtype.itemsize


def tokens_that_fit(model: PreTrainedModel, ratio: float = 1.0) -> int:
    """Return how many tokens' activations, each ``ratio`` times the estimate, fit in the share of the memory for a pass."""
    # Of the total, not the free memory: a resumed run must make the same passes.
    memory = torch.cuda.mem_get_info()[1] if model.device.type == "cuda" else machine_memory()
    return min(MOST_TOKENS, max(LEAST_TOKENS, int(MEMORY_SHARE * memory / (ratio * token_bytes(model)))))
