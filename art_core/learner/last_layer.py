"""The last decoder layer, computed only where a target is predicted. Knows nothing about trees, targets or losses.

Nothing but the LM head reads what the last layer makes of a token, and the head reads it at trained positions alone. Keys
and values are still made of every token; queries, their attention and the MLP are made of the wanted rows. What stands in
the other rows afterwards is meaningless.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

ROWS = "art_rows"
"""The attribute of the last layer's attention module under which ``tree_attention`` finds the wanted rows."""


@contextmanager
def only_rows(base: PreTrainedModel, rows: Tensor) -> Iterator[None]:
    """Let the last layer of ``base`` compute only ``rows``, (wanted,) int64, places in the input row, ascending and each once.

    Raises AttributeError where the layer is not made of ``self_attn`` and ``mlp``.
    """
    layer = base.get_decoder().layers[-1]
    attention, mlp = layer.self_attn, layer.mlp
    tokens = 0

    def take(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal tokens
        tokens = inputs[0].shape[1]
        return inputs[0].index_select(1, rows), *inputs[1:]

    def put_back(_: torch.nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return spread(output, 1, rows, tokens)

    hooks = [mlp.register_forward_pre_hook(take), mlp.register_forward_hook(put_back)]
    setattr(attention, ROWS, rows)
    try:
        yield
    finally:
        delattr(attention, ROWS)
        for hook in hooks:
            hook.remove()


def spread(found: Tensor, dimension: int, rows: Tensor, length: int) -> Tensor:
    """Return ``found`` with its slices along ``dimension`` at ``rows`` of ``length``; zeros elsewhere."""
    shape = list(found.shape)
    shape[dimension] = length
    return found.new_zeros(shape).index_copy(dimension, rows, found)
