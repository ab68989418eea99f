"""Threads of a forward pass with few rows on a CPU: several for matrix products and attention, one for all else.

torch uses all threads from 32,768 numbers on, and to wake one takes longer than to add or multiply so few: the norm of 64 rows of
576 numbers takes some 20 microseconds with one thread and 170 with two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from art_core.plugin_api import cpu

FEW = 128
"""Rows up to which one thread is faster."""
IN_LINEAR = 0.9
"""The share of a model's weights, without embeddings, that must be in linear layers. Experts would lose their threads."""


class FewRows:
    """Gives linear layers of a model their threads while ``apart`` is open; ``threads`` are those of the caller."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.threads = 0
        """0: not open."""
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        inside = {id(module.weight) for module in linear}
        embedded = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)} - inside
        sizes = {id(p): p.numel() for p in model.parameters() if id(p) not in embedded}
        share = sum(size for each, size in sizes.items() if each in inside) / max(1, sum(sizes.values()))
        self.applies = model.device.type == "cpu" and share >= IN_LINEAR
        self._hooks: list[RemovableHandle] = []
        for module in linear if self.applies else ():
            self._hooks += module.register_forward_pre_hook(self._begin), module.register_forward_hook(self._end)

    def remove(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def apart(self, rows: int) -> Iterator[None]:
        """Compute all but linear layers and ``parallel`` blocks with one thread, if that is faster for so many rows."""
        threads = torch.get_num_threads()
        if not self.applies or rows > FEW or threads == 1:
            yield
            return
        self.threads = threads
        try:
            with cpu.torch_threads(1):
                yield
        finally:
            self.threads = 0

    @contextmanager
    def parallel(self) -> Iterator[None]:
        """Compute the block with all threads."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self, *_: Any) -> None:
        if self.threads:
            torch.set_num_threads(self.threads)

    def _end(self, *_: Any) -> None:
        if self.threads:
            torch.set_num_threads(1)
