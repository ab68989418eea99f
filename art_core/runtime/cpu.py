"""How torch computes on a CPU. Imports torch when it is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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

    setting = getattr(torch.backends.mkldnn, "matmul", None)  # from torch 2.9 on
    if not setting or torch.cpu._is_amx_tile_supported() or not torch.cpu._is_avx512_bf16_supported():
        yield
        return
    before, setting.fp32_precision = setting.fp32_precision, "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before
