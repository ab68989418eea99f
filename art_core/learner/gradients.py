"""Token trees and a loss -> gradients and metrics, a pass at a time. Knows nothing about optimizers or how models are loaded."""

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
"""Of the memory, for the activations of one pass where ``max_tokens_per_pass`` does not say: agents, engine, optimizer
and gradients need theirs."""
MOST_TOKENS = 65536
"""Of a pass, where memory would hold more: longer passes are not faster."""
LEAST_TOKENS = 256
"""Of a pass, however little memory there is; in smaller ones what does not grow with the tokens would be measured."""


@dataclass(frozen=True)
class Totals:
    """Of a step's trees, whoever computes them."""

    trajectories: int
    """With trained targets."""
    targets: int
    """Trained ones."""
    weight: float
    """The sum of the targets' weights."""
    tokens: int

    @classmethod
    def of(cls, trees: Sequence[TokenTree]) -> Totals:
        return cls(
            trajectories=sum(len(np.unique(tree.trajectory[tree.weights != 0])) for tree in trees),
            targets=sum(int(np.count_nonzero(tree.weights)) for tree in trees),
            weight=float(sum(tree.weights.sum(dtype=np.float64) for tree in trees)),
            tokens=sum(tree.num_tokens for tree in trees),
        )

    @property
    def metrics(self) -> dict[str, float]:
        return {name: float(getattr(self, name)) for name in ("tokens", "targets", "trajectories")}


def accumulate(
    passes: Sequence[TokenTree],
    totals: Totals,
    loss: Loss,
    *,
    forward: Callable[[TokenTree], TreeOutputs],
    reference: Callable[[TokenTree], Tensor | None],
    proximal: bool,
) -> dict[str, float]:
    """Add the gradients of the passes' parts of the loss to those of the parameters; return the passes' parts of the metrics.

    The parts add up to the metrics of the step that ``totals`` are of, but for those whose name ends with ``_max``.
    ``forward`` gives the trained targets of a pass, ``reference`` their logprobs under the reference weights or None;
    ``proximal`` hands the loss the logprobs of before the update.
    """
    metrics: dict[str, float] = {}
    for tree in passes:
        known = reference(tree)  # first: switching adapters off and on would break a graph in use
        outputs = forward(tree)
        inputs = _loss_inputs(tree, outputs.logprobs, known, totals, proximal)
        result = loss(inputs)
        result.loss.backward()
        measured = result.metrics | _measured(inputs, outputs)
        share = len(inputs.weights) / totals.targets
        for name, value in measured.items():
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

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array[rows]).to(logprobs.device)

    return LossInputs(
        logprobs=logprobs,
        old_logprobs=on_device(tree.old_logprobs),
        ref_logprobs=reference,
        advantages=on_device(tree.advantages),
        weights=on_device(tree.weights),
        trajectory=on_device(tree.trajectory),
        call=on_device(tree.call),
        step_trajectories=totals.trajectories,
        step_weight=totals.weight,
        proximal_logprobs=logprobs.detach() if proximal else None,
    )


def _measured(inputs: LossInputs, outputs: TreeOutputs) -> dict[str, float]:
    measured = {"logprob_gap": (inputs.logprobs.detach() - inputs.old_logprobs).abs().mean().item()}
    if outputs.entropy is not None:
        measured["entropy"] = outputs.entropy.mean().item()
    return measured


class Measured:
    """A forward pass, and what the largest so far of at most ``max_tokens`` kept for its backward pass: ``ratio`` times the
    estimate, 0 if there was none. Larger trees are computed in pieces that keep nothing, so they say nothing.

    What is kept is counted, not read from the system as the process's peak: that has the memory of other threads in it and
    differs from run to run, and passes must be the same in every run with the same seed and after every resume, because
    where they end shows in the last bits of the gradients.
    """

    def __init__(self, model: PreTrainedModel, forward: Callable[[TokenTree], TreeOutputs], max_tokens: int) -> None:
        self._model, self._forward, self._max_tokens = model, forward, max_tokens
        self._largest = LEAST_TOKENS - 1
        self.ratio = 0.0

    def __call__(self, tree: TokenTree) -> TreeOutputs:
        if not self._largest < tree.num_tokens <= self._max_tokens:
            return self._forward(tree)
        outputs, kept = _kept(self._model, lambda: self._forward(tree))
        self._largest, self.ratio = tree.num_tokens, kept / tree.num_tokens / token_bytes(self._model)
        return outputs


def _kept(model: PreTrainedModel, forward: Callable[[], TreeOutputs]) -> tuple[TreeOutputs, int]:
    """Return what ``forward`` returns, and the bytes that stay allocated for its backward pass."""
    if model.device.type == "cuda":
        before = torch.cuda.memory_allocated(model.device)
        outputs = forward()
        return outputs, torch.cuda.memory_allocated(model.device) - before
    weights = {it.untyped_storage().data_ptr() for it in model.parameters()}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()  # of many views once
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        outputs = forward()
    return outputs, sum(kept.values())


def token_bytes(model: PreTrainedModel) -> int:
    """Return an estimate of the bytes of a token's activations.

    For dense transformer layers that keep what their backward pass needs: about 18 vectors of the hidden size and 6 of the
    feed-forward size a layer.
    """
    config = model.config.get_text_config()
    width = 18 * config.hidden_size + 6 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    return config.num_hidden_layers * width * model.dtype.itemsize


def tokens_that_fit(model: PreTrainedModel, ratio: float = 1.0) -> int:
    """Return how many tokens' activations a share of the memory holds, the GPU's or the machine's.

    A token takes ``ratio`` times the estimate.
    """
    # Not what is free: a run that goes on must make the same passes.
    memory = torch.cuda.mem_get_info()[1] if model.device.type == "cuda" else machine_memory()
    return min(MOST_TOKENS, max(LEAST_TOKENS, int(MEMORY_SHARE * memory / (ratio * token_bytes(model)))))
