"""The only place where the benchmarks use art_core's tree forward pass, so that changes there affect only this file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from art_core import losses
from art_core.learner import tree_logprobs
from art_core.learner.gradients import pack
from art_core.types import LossInputs, TokenTree


def logprobs(model: torch.nn.Module, tree: TokenTree, backend: str | None = None) -> Tensor:
    """Return the logprobs of the trained targets. ``backend`` is one of art_core's; None lets it choose."""
    return tree_logprobs(model, tree, weighted_only=True, backend=backend)


def loss_inputs(
    tree: TokenTree, new: Tensor, step_trajectories: int | None = None, *, on_policy: bool = True
) -> LossInputs:
    """Return the trained targets; ``on_policy`` sets the ratio to 1, whatever old logprobs were recorded."""
    rows = np.flatnonzero(tree.weights)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[rows]).to(new.device)

    return LossInputs(
        logprobs=new, old_logprobs=new.detach() if on_policy else tensor(tree.old_logprobs), ref_logprobs=None,
        advantages=tensor(tree.advantages), weights=tensor(tree.weights), trajectory=tensor(tree.trajectory),
        call=tensor(tree.call), step_trajectories=step_trajectories,
    )  # fmt: skip


def trained_trajectories(trees: Sequence[TokenTree]) -> int:
    """Return the loss's N: the number of trajectories in the step that have trained targets."""
    return sum(len(np.unique(tree.trajectory[tree.weights != 0])) for tree in trees)


def backward(
    model: torch.nn.Module,
    trees: Sequence[TokenTree],
    compute: Callable[[torch.nn.Module, TokenTree], Tensor] = logprobs,
) -> None:
    """Add the gradient of GRPO over all ``trees``; ``compute`` returns the logprobs of a tree's trained targets."""
    trajectories = trained_trajectories(trees)
    for tree in trees:
        losses.grpo(loss_inputs(tree, compute(model, tree), trajectories)).loss.backward()


def computed_tokens(trees: Sequence[TokenTree]) -> int:
    """Return the tokens, padding included, that forward passes over ``trees`` compute, one tree at a time."""
    return sum(tree.num_tokens for tree in trees)


def packed_tokens(trees: Sequence[TokenTree], budget: int) -> int:
    """Return the same if trees are packed into passes of at most ``budget`` tokens.

    A larger tree is computed in pieces whose forward passes are repeated in the backward pass; they are counted once, because
    no recomputation is counted elsewhere.
    """
    return computed_tokens(pack(trees, budget))
