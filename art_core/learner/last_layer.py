"""The last decoder layer, computed only where a target is predicted. Knows nothing about trees, targets or losses.

Nothing but the LM head reads what the last layer makes of a token, and the head reads it at trained positions alone. The
projections are still made of every token; attention and MLP, which cost most, are computed for the wanted rows. What
stands in the other rows afterwards is meaningless.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

SMALL_GAP = 16
"""Rows between two wanted ones that are computed too: attention makes a kernel call for every stretch of rows and one for
every gap, so a row now and then costs less than its gap. Measured on 3 to 100 tokens between runs of 1 to 100: 16 and 32
are never slower than all rows, 0 takes up to 2.5 times as long, 64 loses the gain where gaps are of 20."""

_wanted: ContextVar[tuple[torch.nn.Module, Tensor] | None] = ContextVar("wanted", default=None)
"""The attention module of the layer, and its rows; other threads that use the model compute all of theirs."""


@contextmanager
def only_rows(base: PreTrainedModel, rows: Tensor) -> Iterator[None]:
    """Let the last layer of ``base`` compute only ``rows``, (wanted,) int64, ascending, places in the input row, and small gaps.

    Raises AttributeError where the layer is not made of ``self_attn`` and ``mlp``.
    """
    layer = base.get_decoder().layers[-1]
    rows = filled(rows)
    mine = layer.self_attn, rows
    tokens = 0

    def take(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        nonlocal tokens
        if _wanted.get() is not mine:
            return None
        tokens = inputs[0].shape[1]
        return inputs[0].index_select(1, rows), *inputs[1:]

    def put_back(_: torch.nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        return spread(output, 1, rows, tokens) if _wanted.get() is mine else None

    with layer.mlp.register_forward_pre_hook(take), layer.mlp.register_forward_hook(put_back):
        token = _wanted.set(mine)
        try:
            yield
        finally:
            _wanted.reset(token)


def wanted_rows(attention: torch.nn.Module) -> Tensor | None:
    """Return the rows that this attention module is to compute here and now; None: all."""
    wanted = _wanted.get()
    return wanted[1] if wanted is not None and wanted[0] is attention else None


def filled(rows: Tensor) -> Tensor:
    """Return ascending ``rows``, each once, with those between two that are at most ``SMALL_GAP`` apart."""
    rows = rows.unique_consecutive()
    if not len(rows):
        return rows
    wanted = torch.zeros(int(rows[-1]) + 1, dtype=torch.bool)
    wanted[rows] = True
    for start, gap in zip((rows[:-1] + 1).tolist(), (rows.diff() - 1).tolist(), strict=True):
        if 0 < gap <= SMALL_GAP:
            wanted[start : start + gap] = True
    return wanted.nonzero()[:, 0]


def spread(found: Tensor, dimension: int, rows: Tensor, length: int) -> Tensor:
    """Return ``found`` with its slices along ``dimension`` at ``rows`` of ``length``; zeros elsewhere."""
    shape = list(found.shape)
    shape[dimension] = length
    return found.new_zeros(shape).index_copy_(dimension, rows, found)
