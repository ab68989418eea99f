"""The forward pass for models with custom attention or stateful layers: one row after the other.

Slow, but correct for every model that transformers can run.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from art_embedded.kv import Batch


@dataclass
class _Row:
    ids: list[int] = field(default_factory=list)
    cache: DynamicCache | None = None
    mark: _Row | None = None
    """As it was when it was marked. Never changed, so rows may share it."""

    def copy(self) -> _Row:
        """Return a copy without its mark."""
        return _Row([*self.ids], copy.deepcopy(self.cache))


class PlainKeyValues:
    """One transformers cache per row. A state can't be truncated: rows are continued from their end or copied from their mark.

    ``cache_argument`` is the name under which the model takes a cache. Without one the whole row is computed at every token.
    """

    shares_prefixes = reads_prefixes_once = False

    def __init__(self, model: PreTrainedModel, cache_argument: str | None) -> None:
        self.model, self.cache_argument = model, cache_argument
        config = model.config.get_text_config()
        # Keys and values, twice because a row's mark is as long as its prompt.
        self.token_bytes = 2 * 2 * config.num_hidden_layers * config.hidden_size * model.dtype.itemsize
        self.rows: dict[int, _Row] = {}

    def resize(self, rows: int, capacity: int) -> None:
        self.rows = {number: row for number, row in self.rows.items() if number < rows}

    def copy(self, source: int, target: int, length: int) -> None:
        row = self.rows[source]
        copied = (row if length == len(row.ids) else row.mark).copy()
        copied.mark = row.mark
        self.rows[target] = copied

    def mark(self, row: int) -> None:
        self.rows[row].mark = self.rows[row].copy()

    def swap(self, a: int, b: int, lengths: tuple[int, int]) -> None:
        moved = {new: self.rows.pop(old) for old, new in ((a, b), (b, a)) if old in self.rows}
        self.rows.update(moved)

    def forward(self, batch: Batch) -> Tensor:
        spans = [(token, token + 1) for token in range(batch.decoding)] + batch.runs
        outputs = set(batch.outputs)
        logits = []
        for start, stop in spans:
            offsets = [token - start for token in range(start, stop) if token in outputs]
            logits.append(self._extend(batch, start, stop)[offsets].float())
        return torch.cat(logits)

    def fresh(self) -> PlainKeyValues:
        return PlainKeyValues(self.model, self.cache_argument)

    def _extend(self, batch: Batch, start: int, stop: int) -> Tensor:
        """Append a span to its row; return the logits (tokens, vocabulary) after each of its tokens."""
        number = batch.rows[start]
        if batch.positions[start] == 0:
            self.rows[number] = _Row(cache=DynamicCache(config=self.model.config) if self.cache_argument else None)
        row, fresh = self.rows[number], batch.ids[start:stop]
        row.ids += fresh
        ids = torch.tensor([fresh if self.cache_argument else row.ids], device=self.model.device)
        if self.cache_argument:
            return self.model(input_ids=ids, **{self.cache_argument: row.cache}, use_cache=True).logits[0]
        return self.model(input_ids=ids).logits[0, -len(fresh) :]
