"""How torch computes on a CPU. Imports torch when it is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

FEW_QUERIES = 128
_open = 0
"""Blocks of ``onednn_products`` that are open, in all threads."""


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute the block with ``count`` threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def onednn_products() -> Iterator[None]:
    """Let oneDNN compute float32 matrix products in the block, if that is faster on this CPU and as exact.

    torch gives them to MKL, which takes 2.5 times as long on AMD's processors with AVX-512. It gives them to oneDNN if bfloat16
    is allowed inside, which oneDNN uses only if the processor has AMX; AMD's have not, so products stay float32.
    """
    import torch

    global _open
    if torch.cpu._is_amx_tile_supported() or not torch.cpu._is_avx512_bf16_supported():
        yield
        return
    _open += 1
    _use_onednn(True)
    try:
        yield
    finally:
        _open -= 1
        _use_onednn(_open > 0)


@contextmanager
def attention_of(queries: int) -> Iterator[None]:
    """Let MKL compute the products of attention with few queries in the block, even inside ``onednn_products``.

    oneDNN takes up to seven times as long for them, and less than MKL only from some 200 queries on.
    """
    if not _open or queries > FEW_QUERIES:
        yield
        return
    _use_onednn(False)
    try:
        yield
    finally:
        _use_onednn(_open > 0)  # not what was before: another thread may be in such a block too


def _use_onednn(on: bool) -> None:
    import torch

    if hasattr(torch.backends.mkldnn, "matmul"):  # from torch 2.9 on
        torch.backends.mkldnn.matmul.fp32_precision = "bf16" if on else "none"
