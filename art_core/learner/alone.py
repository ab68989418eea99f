"""How a learner shares its work with other processes; by itself it has no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from art_core.learner.tree_forward import tree_logprobs
from art_core.token_tree import build_tree
from art_core.types import Call, TokenTree, Trajectory

T = TypeVar("T")


class Alone:
    """A learner in one process, which has everything; also the protocol of learners in several (``TorchLearner(group=)``)."""

    rank, size = 0, 1
    shards = False
    """Whether a process has a part of the weights only: then every method of the learner is called on all at the same time."""

    @property
    def device(self) -> torch.device:
        """Where the model is loaded to."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def place(self, model: nn.Module) -> Callable[..., Any]:
        """Take the model's weights in hand; what is returned calls a function with arguments, which may compute the model."""
        return _call

    def share(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        """Return the trees that this process computes."""
        return list(trees)

    def least(self, number: int) -> int:
        """Return the smallest of the processes' numbers."""
        return number

    def idle(self, passes: Callable[[Sequence[TokenTree]], int], trees: Sequence[TokenTree]) -> int:
        """Return how often this process computes something empty meanwhile: the others cannot do without its part."""
        return 0

    def add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make the gradients those of all processes' trees together."""

    def joined(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the sum of the processes' metrics, the largest of those whose name ends with ``_max``."""
        return dict(metrics)

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors as one process would have them; where several do, on the CPU of the first, else empty."""
        return dict(tensors)

    def laid_out(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Return what of a whole tensor this process keeps, where and as ``like`` is."""
        return tensor.to(like.device)

    def wait(self) -> None:
        """Return when all processes are here."""


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor that processes have parts of as a whole; they all ask together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def empty_pass(model: nn.Module, compute: Callable[..., Any], reference: Callable[[TokenTree], Any]) -> None:
    """Compute what changes no gradient, in step with the other processes."""
    call = Call(prompt_ids=(0,), sampled_ids=(0,), logprobs=(0.0,))
    tree = build_tree([Trajectory(task=None, calls=(call,))])
    reference(tree)
    (compute(tree_logprobs, model, tree).sum() * 0.0).backward()


def _call(function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    return function(*arguments, **keywords)
