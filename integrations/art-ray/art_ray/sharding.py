"""How processes share a learner's work: which trees each computes, and what is summed.

Every process gets all the trees of a step and computes its share. So each knows the step's totals, and only gradients and
metrics are exchanged. A tree is never cut, because attention needs its whole paths. Both ways need ``torch.distributed``, which
the caller sets up:

- ``Replicated``: every process has all weights and the whole optimizer; gradients are summed once, after the last pass
- ``Sharded``: FSDP2; every process has a part of weights, gradients and optimizer state, and a layer is whole while it computes
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
"""Numbers per message when gradients are summed: 128 MiB, which is also the extra memory that it takes."""


class Replicated(Alone):
    """Every process has the same weights; they stay the same, because all make the same steps with the same gradients."""

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise ConfigError("a learner on several processes needs torch.distributed: call init_process_group() first")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def share(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        return shares(trees, self.size)[self.rank]

    def least(self, number: int) -> int:
        smallest = torch.tensor(number, device=self._message_device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)

    @torch.no_grad()
    def add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:  # this process had no tree
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([parameter.grad for parameter in parameters]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            for gradient, piece in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                gradient.copy_(piece.view_as(gradient))

    def joined(self, metrics: Mapping[str, float]) -> dict[str, float]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, dict(metrics))
        names = dict.fromkeys(name for each in gathered for name in each)
        return {
            name: (max if name.endswith("_max") else sum)(each[name] for each in gathered if name in each)
            for name in names
        }

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {} if self.rank else dict(tensors)

    def wait(self) -> None:
        self.joined({})

    @property
    def _message_device(self) -> str:
        """The device of tensors that processes exchange."""
        return "cuda" if dist.get_backend() == "nccl" else "cpu"


class Sharded(Replicated):
    """FSDP2. A tree must be one forward pass, because all processes must compute every layer equally often."""

    shards = True

    def __init__(self) -> None:
        super().__init__()
        self._mesh = dist.init_device_mesh(self._message_device, (self.size,))

    @property
    def device(self) -> torch.device:
        """The CPU, because the whole model may not fit on a GPU; it is moved there layer by layer."""
        return torch.device("cpu")

    def place(self, model: nn.Module) -> Callable[..., Any]:
        """Shard the decoder's layers one by one and all other weights together.

        Layers recompute their activations in the backward pass, so a tree never has to be cut.
        """
        from torch.distributed.fsdp import FSDPModule, fully_shard

        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.gradient_checkpointing_enable({"use_reentrant": False})
        without_dropout(model.train())
        for layer in base.get_decoder().layers:
            fully_shard(layer, mesh=self._mesh)
        root = fully_shard(_Root(model), mesh=self._mesh)

        def compute(function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
            result = root(function, *arguments, **keywords)
            # Otherwise the backward pass reshards. While way_of tries ways to compute a tree, a failing layer stays unsharded.
            for module in root.modules() if function is way_of or not torch.is_grad_enabled() else ():
                if isinstance(module, FSDPModule):
                    module.reshard()
            return result

        if compute(way_of, model).backend == "paths":
            raise ConfigError(
                f"{type(base).__name__} is computed path by path, but sharding='fsdp' needs one pass per tree; use "
                "sharding='ddp', with a LoRA adapter if all weights are too large"
            )
        return compute

    def idle(self, passes: Callable[[Sequence[TokenTree]], int], trees: Sequence[TokenTree]) -> int:
        counts = [passes(share) for share in shares(trees, self.size)]
        return max(counts) - counts[self.rank]

    @torch.no_grad()
    def add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self.size)  # FSDP2 averages over the processes, but the loss is a sum

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        gathered: dict[int, Tensor] = {}
        for tensor in tensors.values():
            if id(tensor) not in gathered:
                full = full_tensor(tensor.detach())  # a collective operation: all processes must take part
                gathered[id(tensor)] = torch.empty(0) if self.rank else full.cpu()
        return {} if self.rank else {name: gathered[id(tensor)] for name, tensor in tensors.items()}

    def laid_out(self, tensor: Tensor, like: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, distribute_tensor

        if not isinstance(like, DTensor):
            return super().laid_out(tensor, like)
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


class _Root(nn.Module):
    """Holds the weights outside the layers: they are whole while a function that computes the model runs in ``forward``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        return function(*arguments, **keywords)


def shares(trees: Sequence[TokenTree], count: int) -> list[list[TokenTree]]:
    """Return the trees of each of ``count`` processes, with about the same number of tokens in every share.

    The largest trees are assigned first, each to the share with the fewest tokens so far; a share may be empty.
    """
    members: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for index in sorted(range(len(trees)), key=lambda i: -trees[i].num_tokens):
        rank = tokens.index(min(tokens))
        members[rank].append(index)
        tokens[rank] += trees[index].num_tokens
    return [[trees[index] for index in sorted(share)] for share in members]


def processes(sharding: str) -> Alone:
    """Return how the processes of ``torch.distributed``'s default group share the work, for ``"ddp"`` or ``"fsdp"``."""
    kinds = {"ddp": Replicated, "fsdp": Sharded}
    if sharding not in kinds:
        raise ConfigError(f"sharding={sharding!r} is unknown; use 'ddp' (all weights everywhere) or 'fsdp' (FSDP2)")
    return kinds[sharding]()


def without_dropout(model: nn.Module) -> None:
    """Disable dropout, because recomputation needs training mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the gradients in order, grouped into lists of about ``BUCKET`` numbers of one dtype."""
    buckets: list[list[Tensor]] = []
    room = 0
    for gradient in gradients:
        if not buckets or gradient.numel() > room or gradient.dtype != buckets[-1][-1].dtype:
            buckets.append([])
            room = BUCKET
        buckets[-1].append(gradient)
        room -= gradient.numel()
    return buckets
