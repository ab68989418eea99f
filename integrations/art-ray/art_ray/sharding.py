"""How a learner's work is shared by processes: which trees are whose, and what is added up.

Every process is given all the trees of a step and computes its share, so the step's totals are known without asking; what is
exchanged are gradients and metrics. A tree is never cut: attention needs its whole paths. Both ways need ``torch.distributed``,
set up by whoever starts the processes:

- ``Replicated``: every process has all weights and the whole optimizer; gradients are summed once, after the last pass
- ``Sharded``: FSDP2; every process keeps its part of weights, gradients and optimizer, and a layer is whole while it computes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from art_core.errors import ConfigError
from art_core.learner.alone import Alone, full_tensor
from art_core.learner.tree_forward import way_of
from art_core.types import TokenTree

T = TypeVar("T")
BUCKET = 2**25
"""Numbers that are summed in one message: 128 MiB, the memory that summing takes besides."""


class Replicated(Alone):
    """Every process has the same weights. They stay the same: all take the same steps with the same gradients."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise ConfigError("a learner on several processes needs torch.distributed: call init_process_group() first")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def share(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        return shares(trees, self.size)[self.rank]

    def least(self, number: int) -> int:
        found = torch.tensor(number, device=self._messages)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    @torch.no_grad()
    def add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:  # of a process without a tree
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([parameter.grad for parameter in parameters]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            for gradient, piece in zip(bucket, flat.split([it.numel() for it in bucket]), strict=True):
                gradient.copy_(piece.view_as(gradient))

    def joined(self, metrics: Mapping[str, float]) -> dict[str, float]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, dict(metrics))
        names = dict.fromkeys(name for each in found for name in each)
        return {
            name: (max if name.endswith("_max") else sum)(each[name] for each in found if name in each)
            for name in names
        }

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {} if self.rank else dict(tensors)

    def wait(self) -> None:
        self.joined({})

    @property
    def _messages(self) -> str:
        """Where tensors are that are sent."""
        return "cuda" if dist.get_backend() == "nccl" else "cpu"


class Sharded(Replicated):
    """FSDP2. Only where a tree is one forward pass: all processes must come by every layer equally often."""

    shards = True

    def __init__(self) -> None:
        super().__init__()
        self._mesh = dist.init_device_mesh(self._messages, (self.size,))

    @property
    def device(self) -> torch.device:
        """The whole model may not fit on a GPU: it gets there layer by layer."""
        return torch.device("cpu")

    def place(self, model: nn.Module) -> Callable[..., Any]:
        """Shard the decoder's layers one by one and all other weights together.

        Layers recompute their activations in the backward pass, so a tree is never cut into pieces.
        """
        from torch.distributed.fsdp import FSDPModule, fully_shard

        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.gradient_checkpointing_enable({"use_reentrant": False})
        without_dropout(model.train())
        for layer in base.get_decoder().layers:
            fully_shard(layer, mesh=self._mesh)
        root = fully_shard(_Root(model), mesh=self._mesh)

        def compute(function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
            found = root(function, *arguments, **keywords)
            # Else a backward pass does. A layer that failed in one way of computing a tree has kept its weights whole.
            for module in root.modules() if function is way_of or not torch.is_grad_enabled() else ():
                if isinstance(module, FSDPModule):
                    module.reshard()
            return found

        if compute(way_of, model).backend == "paths":
            raise ConfigError(
                f"{type(base).__name__} is computed path by path, and sharding needs one pass for a tree; give "
                "sharding='ddp', with a LoRA adapter where all weights are too large"
            )
        return compute

    def idle(self, passes: Callable[[Sequence[TokenTree]], int], trees: Sequence[TokenTree]) -> int:
        counts = [passes(share) for share in shares(trees, self.size)]
        return max(counts) - counts[self.rank]

    @torch.no_grad()
    def add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self.size)  # FSDP2 has averaged over the processes; the loss is a sum

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[int, Tensor] = {}
        for tensor in tensors.values():
            if id(tensor) not in found:
                full = full_tensor(tensor.detach())  # by all processes together
                found[id(tensor)] = torch.empty(0) if self.rank else full.cpu()
        return {} if self.rank else {name: found[id(tensor)] for name, tensor in tensors.items()}

    def laid_out(self, tensor: Tensor, like: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(like, DTensor):
            return super().laid_out(tensor, like)
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


class _Root(nn.Module):
    """Holds the weights that belong to no layer: they are whole while a function runs that computes the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        return function(*arguments, **keywords)


def shares(trees: Sequence[TokenTree], count: int) -> list[list[TokenTree]]:
    """Return the trees of each of ``count`` processes, each tree whole, with about as many tokens in every share.

    The largest are placed first, each where there are the fewest tokens so far; a share may be empty.
    """
    members: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for index in sorted(range(len(trees)), key=lambda i: -trees[i].num_tokens):
        place = tokens.index(min(tokens))
        members[place].append(index)
        tokens[place] += trees[index].num_tokens
    return [[trees[index] for index in sorted(mine)] for mine in members]


def processes(sharding: str) -> Alone:
    """Return how the processes of ``torch.distributed``'s group share the work: ``"ddp"`` or ``"fsdp"``."""
    kinds = {"ddp": Replicated, "fsdp": Sharded}
    if sharding not in kinds:
        raise ConfigError(f"sharding={sharding!r} is unknown; use 'ddp' (all weights everywhere) or 'fsdp' (FSDP2)")
    return kinds[sharding]()


def without_dropout(model: nn.Module) -> None:
    """Let training mode, which recomputation needs, drop nothing."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the gradients in order, in lists of about ``BUCKET`` numbers of one type."""
    buckets: list[list[Tensor]] = []
    room = 0
    for gradient in gradients:
        if not buckets or gradient.numel() > room or gradient.dtype != buckets[-1][-1].dtype:
            buckets.append([])
            room = BUCKET
        buckets[-1].append(gradient)
        room -= gradient.numel()
    return buckets
