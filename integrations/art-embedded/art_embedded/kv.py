"""Stores the keys and values of many conversations in one tensor, and runs one forward pass over tokens of all of them.

Works with every transformers model whose attention uses ``AttentionInterface``; ``plain.py`` serves the others.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from art_core.plugin_api import cpu
from art_embedded.few_rows import FewRows
from art_embedded.shared_prefixes import LONGEST_REST, Shared, SharedAttention

ATTENTION = "art_packed"
"""Registered name of ``_attend``. transformers builds no mask for attention that it doesn't know, which saves building an unused
one at every step."""


@dataclass
class Batch:
    """The tokens of one forward pass: first one token for each decoding row 0, 1, ..., then runs of prompt tokens."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    """Position of each token in its row. The row's earlier tokens are already stored, or precede it in this batch."""
    rows: list[int] = field(default_factory=list)
    """Row of each token."""
    decoding: int = 0
    """The first ``decoding`` tokens belong to rows 0 to ``decoding - 1``, one each."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """(start, stop) in ``ids`` of each run of prompt tokens; a run has one row and consecutive positions."""
    outputs: list[int] = field(default_factory=list)
    """Indices of the tokens whose logits are needed, ascending."""
    shared: Sequence[Shared] = ()
    """Prefixes that decoding rows have in common; each row is in at most one."""


class KeyValues(Protocol):
    """The stored keys and values of rows, and the forward pass that reads and extends them."""

    shares_prefixes: bool
    """Whether the front part of a row can be copied or kept; else rows can be continued from their end or their mark only."""
    reads_prefixes_once: bool
    """Whether ``Batch.shared`` makes a forward pass faster."""
    token_bytes: int
    """Bytes per token."""

    def resize(self, rows: int, capacity: int) -> None:
        """Resize to ``rows`` rows of ``capacity`` tokens; remaining rows keep their content."""
        ...

    def copy(self, source: int, target: int, length: int) -> None: ...

    def mark(self, row: int) -> None:
        """Keep the row's state as it is now, so that it can be copied later. Called only if prefixes can't be shared."""
        ...

    def swap(self, a: int, b: int, lengths: tuple[int, int]) -> None: ...

    def forward(self, batch: Batch) -> Tensor:
        """Store the batch's keys and values; return float32 logits (len(batch.outputs), vocabulary)."""
        ...

    def fresh(self) -> KeyValues:
        """Return an empty cache for the same model."""
        ...


class PackedKeyValues:
    """All rows in one tensor. Decoding rows are at the front, so that attention reads a view without gathering."""

    shares_prefixes = True

    def __init__(self, model: PreTrainedModel, few_rows: FewRows) -> None:
        self.model, self.few_rows = model, few_rows
        self.device = model.device
        text_config = model.config.get_text_config()
        self.layers: int = text_config.num_hidden_layers
        self.windows = _windows(text_config)
        self.rows, self.capacity = 0, 0
        self.stored: list[Tensor] = []
        """Keys and values, each (rows, layers, capacity, heads * head size). A row's layers are contiguous, so that a row is
        copied in one operation, and so are a token's heads, so that tokens are stored with one ``index_copy_``."""
        self.seen_windows: set[int] = set()

    @property
    def reads_prefixes_once(self) -> bool:
        """Only on a CPU, and not with latent attention, whose values are smaller than its keys."""
        return self.device.type == "cpu" and len({stored.shape[-1] for stored in self.stored}) == 1

    @property
    def token_bytes(self) -> int:
        return sum(self.layers * stored.shape[-1] * stored.element_size() for stored in self.stored)

    def resize(self, rows: int, capacity: int) -> None:
        self.rows, self.capacity = rows, capacity
        self.stored = [self._resized(stored) for stored in self.stored]

    def _resized(self, old: Tensor) -> Tensor:
        # Not uninitialized memory: it could contain NaN, and NaN times a masked weight of 0 is still NaN.
        new = old.new_zeros(self.rows, self.layers, self.capacity, old.shape[-1])
        rows, capacity = min(old.shape[0], self.rows), min(old.shape[2], self.capacity)
        new[:rows, :, :capacity] = old[:rows, :, :capacity]
        return new

    def copy(self, source: int, target: int, length: int) -> None:
        for stored in self.stored:
            stored[target, :, :length] = stored[source, :, :length]

    def swap(self, a: int, b: int, lengths: tuple[int, int]) -> None:
        length_a, length_b = lengths
        for stored in self.stored:
            row_a = stored[a, :, :length_a].clone()
            stored[a, :, :length_b] = stored[b, :, :length_b]
            stored[b, :, :length_a] = row_a

    def forward(self, batch: Batch) -> Tensor:
        device = self.device
        positions = torch.tensor(batch.positions, device=device)
        flat = torch.tensor(batch.rows, device=device).mul_(self.layers * self.capacity).add_(positions)
        flat = flat + torch.arange(self.layers, device=device)[:, None] * self.capacity
        keep: int | Tensor = 0
        if len(batch.outputs) < len(batch.ids):
            keep = torch.tensor(batch.outputs, dtype=torch.long, device=device)
        _running.step = _Step(self, batch, positions, flat)
        try:
            with self.few_rows.apart(len(batch.ids)):
                output = self.model(
                    input_ids=torch.tensor([batch.ids], device=device),
                    position_ids=positions[None],
                    use_cache=False,
                    logits_to_keep=keep,
                )
        finally:
            _running.step = None
        return output.logits[0].float()

    def fresh(self) -> PackedKeyValues:
        return PackedKeyValues(self.model, self.few_rows)

    def store(self, layer: int, flat: Tensor, key: Tensor, value: Tensor) -> None:
        """Write the batch's keys and values, each (1, heads, tokens, head size), to the flat indices ``flat``."""
        fresh = [states.transpose(1, 2).reshape(states.shape[2], -1) for states in (key, value)]
        if not self.stored:
            self.stored = [new.new_zeros(self.rows, self.layers, self.capacity, new.shape[1]) for new in fresh]
        for stored, new in zip(self.stored, fresh, strict=True):
            stored.view(-1, stored.shape[-1]).index_copy_(0, flat[layer], new)

    def window(self, layer: int, reported: int | None) -> int | None:
        """Return the sliding window of ``layer``: what its attention module ``reported``, else the config's."""
        window = reported if reported is not None else self.windows[layer]
        if window is not None:
            self.seen_windows.add(window)
        return window


class _Step:
    """The state of one forward pass."""

    def __init__(self, kv: PackedKeyValues, batch: Batch, positions: Tensor, flat: Tensor) -> None:
        self.kv, self.batch, self.positions, self.flat = kv, batch, positions, flat
        self.longest = max(batch.positions[: batch.decoding], default=0) + 1
        self.masks: dict[tuple[int | None, ...], Tensor | None] = {}
        """Masks are the same in all layers of one kind, so they are built once."""
        self.shared, self.alone = self._divided()

    def _divided(self) -> tuple[SharedAttention | None, list[slice]]:
        """Return the attention of the decoding rows that share prefixes, and the runs of rows that don't."""
        positions, count = self.batch.positions, self.batch.decoding
        groups = [
            group
            for group in self.batch.shared
            if max(positions[row] + 1 for row in group.rows) <= (1 + LONGEST_REST) * group.length
        ]
        if not groups or not self.kv.reads_prefixes_once:
            return None, [slice(0, count)]
        borders = [-1, *sorted(row for group in groups for row in group.rows), count]
        alone = [slice(a + 1, b) for a, b in pairwise(borders) if b > a + 1]
        return SharedAttention(groups, self.positions, self.kv.layers, self.kv.capacity), alone

    def views(self, layer: int, rows: slice, length: int, heads: int) -> list[Tensor]:
        """Return views of keys and values, each (rows, heads, length, head size)."""
        return [s[rows, layer, :length].unflatten(-1, (heads, -1)).transpose(1, 2) for s in self.kv.stored]

    def decode(self, layer: int, query: Tensor, heads: int, window: int | None, attention: _Attention) -> Tensor:
        """Attend with one query per row; ``query`` is (heads, rows, head size)."""
        count = self.batch.decoding
        # The queries that share a key head use the sequence dimension, so that no key is repeated.
        grouped = query[:, :count].transpose(0, 1).reshape(count, heads, -1, query.shape[-1])
        with cpu.attention_of(queries=1), self.kv.few_rows.parallel():
            if self.shared is None or window is not None or not attention.is_plain:
                return self._decode_alone(layer, slice(0, count), grouped, window, attention).reshape(
                    count, query.shape[0], -1
                )
            mixed = torch.empty_like(grouped)
            mixed[self.shared.rows] = self.shared(grouped[self.shared.rows], self.kv.stored, layer, attention.scaling)
            for rows in self.alone:
                mixed[rows] = self._decode_alone(layer, rows, grouped[rows], None, attention)
        return mixed.reshape(count, query.shape[0], -1)

    def _decode_alone(
        self, layer: int, rows: slice, query: Tensor, window: int | None, attention: _Attention
    ) -> Tensor:
        """Attend with the queries of some rows, (rows, key heads, queries, head size)."""
        key, value = self.views(layer, rows, self.longest, query.shape[1])
        mask_key = (rows.start, rows.stop, self.longest, window)
        if mask_key not in self.masks:
            self.masks[mask_key] = _mask(self.positions[rows, None, None, None], self.longest, window, query.dtype)
        return attention(query, key, value, self.masks[mask_key])

    def run(
        self, layer: int, start: int, stop: int, query: Tensor, heads: int, window: int | None, attention: _Attention
    ) -> Tensor:
        """Attend with the queries of one run of prompt tokens; ``query`` is (heads, tokens, head size)."""
        row, past, length = self.batch.rows[start], self.batch.positions[start], self.batch.positions[stop - 1] + 1
        key, value = self.views(layer, slice(row, row + 1), length, heads)
        mask_key = (past, length, window)
        if mask_key not in self.masks:
            unmasked = stop - start == 1 and (window is None or window >= length)
            self.masks[mask_key] = (
                None if unmasked else _mask(self.positions[start:stop, None], length, window, query.dtype)
            )
        groups = query.shape[0] // heads
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        return attention(query[None, :, start:stop], key, value, self.masks[mask_key])[0].transpose(0, 1)


@dataclass
class _Attention:
    """Attention with a layer's own parameters."""

    scaling: float | None
    softcap: float | None
    sinks: Tensor | None
    """(query heads,): a logit per head that absorbs attention weight without a value (gpt-oss)."""

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return (rows, heads, queries, head size). ``mask`` is added to the scores."""
        if self.is_plain:
            return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scaling)
        scale = self.scaling if self.scaling is not None else query.shape[-1] ** -0.5
        scores = (query @ key.transpose(-1, -2)).float() * scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if mask is not None:
            scores = scores + mask
        if self.sinks is not None:
            rows, heads, queries, _ = scores.shape
            # In ``decode``, a key head's grouped queries match its sinks one to one; in ``run``, each head has one sink.
            sinks = self.sinks.float().reshape(1, heads, -1, 1).expand(rows, heads, queries, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1).to(value.dtype)
        return weights[..., : key.shape[-2]] @ value


def _mask(positions: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return (..., length): 0 for keys that a query at ``positions`` (..., 1) attends to, else minus infinity."""
    keys = torch.arange(length, device=positions.device)
    hidden = keys > positions
    if window is not None:
        hidden = hidden | (keys <= positions - window)
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: store the batch's keys and values, then attend within each row."""
    step: _Step = _running.step
    kv, batch, layer, heads = step.kv, step.batch, module.layer_idx, key.shape[1]
    kv.store(layer, step.flat, key, value)
    window = kv.window(layer, sliding_window)
    attention = _Attention(scaling, softcap, s_aux)
    mixed = []
    if batch.decoding:
        mixed.append(step.decode(layer, query[0], heads, window, attention))
    for start, stop in batch.runs:
        with cpu.attention_of(queries=stop - start), kv.few_rows.parallel():
            mixed.append(step.run(layer, start, stop, query[0], heads, window, attention))
    return (mixed[0] if len(mixed) == 1 else torch.cat(mixed))[None].contiguous(), None


def _windows(text_config: Any) -> list[int | None]:
    kinds = getattr(text_config, "layer_types", None) or ["full_attention"] * text_config.num_hidden_layers
    window = getattr(text_config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in kinds]


_running = threading.local()
"""Holds this thread's current ``_Step``, because not every model passes extra arguments to its attention."""

AttentionInterface.register(ATTENTION, _attend)
