"""Tensors that another process can read in place. Knows nothing about models or training."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

logger = logging.getLogger("art_core.learner")

FOLDER = Path("/dev/shm")
"""Linux keeps shared memory here and kills who writes more than fits. Other systems have no such limit."""
SHARE = 0.9
"""Of what is free there, the part that may be taken."""
ALIGNMENT = 16
"""Floats; the 64 bytes at which torch starts tensors of its own."""


def shared_tensors(shapes: Mapping[str, torch.Size]) -> dict[str, Tensor] | None:
    """Return a float32 tensor of zeros for each of ``shapes``, or None, which is logged, where they do not fit.

    All are views of one piece of memory, so sending them takes one file descriptor.
    """
    padded = [-(-shape.numel() // ALIGNMENT) * ALIGNMENT for shape in shapes.values()]
    size = 4 * sum(padded)
    free = shutil.disk_usage(FOLDER).free if FOLDER.is_dir() else None
    if free is not None and size > SHARE * free:
        logger.warning(
            "the weights to share with the engine (%.0f MB) do not fit in %s (%.0f MB free), so every step writes a folder "
            "that the engine loads, which is slower; give it more space, in Docker with --shm-size",
            size / 1e6,
            FOLDER,
            free / 1e6,
        )
        return None
    pieces = torch.zeros(sum(padded)).share_memory_().split(padded)
    return {
        name: piece[: shape.numel()].view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }


@torch.no_grad()
def move(parameters: Mapping[str, torch.nn.Parameter], into: Mapping[str, Tensor]) -> None:
    """Give CPU ``parameters`` the memory of ``into``, where they keep their values and stay when they are trained."""
    for name, parameter in parameters.items():
        into[name].copy_(parameter)
        # Through NumPy each gets a storage of its own: transformers takes parameters with one storage for tied ones.
        parameter.data = torch.from_numpy(into[name].numpy())
