"""How a learner divides its work between processes: ``Alone`` is a single process and the base class of process groups."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from art_core.learner.tree_forward import tree_logprobs
from art_core.token_tree import build_tree
from art_core.types import Call, TokenTree, Trajectory


class Alone:
    """A single process; also the protocol of process groups (``TorchLearner(group=)``)."""

    rank, size = 0, 1
    shards = False
    """Whether each process holds only a part of the weights: then all must call each of the learner's methods together."""

    @property
    def device(self) -> torch.device:
        """The device that the model is loaded onto."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def place(self, model: nn.Module) -> Callable[..., Any]:
        """Take over the model's weights; call functions that compute the model through the function returned."""
        return operator.call

    def share(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Return the trees that this process computes."""
        return list(trees)

    def least(self, number: int) -> int:
        """Return the minimum of ``number`` over all processes."""
        return number

    def idle(self, passes: Callable[[Sequence[TokenTree]], int], trees: Sequence[TokenTree]) -> int:
        """Return how many empty passes this process makes, because the others need its part of the weights."""
        return 0

    def add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients over all processes."""

    def joined(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the sum of each metric over all processes, or the maximum if its name ends with ``_max``."""
        return dict(metrics)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return unsharded tensors; in a group on the first process only, on its CPU if they were sharded, else ``{}``."""
        return dict(tensors)

    def laid_out(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return this process's part of an unsharded tensor, on the device of ``like`` and sharded in the same way."""
        return tensor.to(like.device)

    def wait(self) -> None:
        """Wait until all processes have called this."""


def full_tensor(tensor: Tensor) -> Tensor:
    """Return an unsharded tensor; all processes must call this together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def empty_pass(model: nn.Module, compute: Callable[..., Any], reference: Callable[[TokenTree], Any]) -> None:
    """Run a pass that adds zero to the gradients, in step with the other processes."""
    call = Call(prompt_ids=(0,), sampled_ids=(0,), logprobs=(0.0,))
    tree = build_tree([Trajectory(task=None, calls=(call,))])
    reference(tree)
    (compute(tree_logprobs, model, tree).sum() * 0.0).backward()
