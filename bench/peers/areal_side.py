"""AReaL's packed tree: its rows, its dense mask and its logprobs, on a plain transformers model.

AReaL's own attention is a compiled FlexAttention, which has no backward pass on CPUs, so the dense mask that AReaL builds for
Megatron goes to transformers' attention. A sample is one call, as AReaL exports an agent's calls by default.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.peers.batch import Batch, trie_size
from bench.plain import Row, dense_logits, objective, padded

BLOCK = 128
"""Rows are multiples of the block of AReaL's FlexAttention."""


def _import_areal() -> None:
    with contextlib.redirect_stdout(sys.stderr):  # its log would otherwise be among the tables
        import areal.models.tree_attn.tree  # noqa: F401


def pack(rows: Sequence[Sequence[int]], length: int) -> Any:
    """Return AReaL's micro-batches: trees of at most ``length`` tokens, each padded to it. Raises ImportError without AReaL."""
    _import_areal()
    from areal.api.cli_args import MicroBatchSpec
    from areal.models.tree_attn.tree import build_packed_tree_batch

    return build_packed_tree_batch(_data(rows), MicroBatchSpec(max_tokens_per_mb=length))


def count(rows: Sequence[Sequence[int]], length: int) -> tuple[int, int]:
    """Return the tokens of ``pack``'s trees without and with padding, without the masks, which take minutes."""
    _import_areal()
    from areal.models.tree_attn.tree import _greedy_build_tries

    trees, live = _greedy_build_tries(_data(rows), length)
    return sum(live), len(trees) * length


def _data(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    cpu = torch.device("cpu")
    return {"input_ids": padded(rows, cpu), "attention_mask": padded([[1] * len(row) for row in rows], cpu)}


def areal_side(batch: Batch) -> tuple[Callable[[torch.nn.Module], None], int, int]:
    """Return the pass over the batch, its tokens without padding, and with padding: one row, rounded up to a block.

    Raises ImportError without AReaL.
    """
    unique = trie_size([row.ids for row in batch.calls])
    packed = pack([row.ids for row in batch.calls], -(-unique // BLOCK) * BLOCK)
    live, area = sum(packed.group_lens), sum(packed.padded_to_lengths)
    trees = [(tree["trie_node"], tree["input_ids"], tree["position_ids"]) for tree in packed.mbs]
    weights = [_weights(batch.calls, trie.all_sequence_ids) for trie, _, _ in trees]

    def step(model: torch.nn.Module) -> None:
        for (trie, ids, positions), weight in zip(trees, weights, strict=True):
            objective(tree_logprobs(model, trie, ids, positions), weight, batch.trained).backward()

    return step, live, area


def tree_logprobs(model: torch.nn.Module, trie: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the logprobs of every sample's tokens, one sample after the other; a sample's last one has no meaning."""
    from areal.models.tree_attn.functional import gather_packed_tree_logprobs_entropy
    from areal.models.tree_attn.tree import build_attention_mask_from_trie

    seen = build_attention_mask_from_trie(trie, ids.shape[1], ids.device)
    seen |= torch.eye(ids.shape[1], dtype=torch.bool)  # padding sees itself, so that no softmax is over nothing
    logits = dense_logits(model, ids, positions, seen)
    with torch.compiler.set_stance("force_eager"):  # AReaL compiles this, for minutes on a CPU
        return gather_packed_tree_logprobs_entropy(logits, trie, ids)[0]


def _weights(rows: Sequence[Row], order: Sequence[int]) -> Tensor:
    """Return each token's advantage, 0 if it isn't trained, where AReaL has its logprob: one place before it."""
    parts = [np.append(rows[number].trained[1:] * rows[number].advantage, 0.0) for number in order]
    return torch.from_numpy(np.concatenate(parts))
