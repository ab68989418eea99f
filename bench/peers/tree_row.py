"""TRL's ``TreeRow``: the rows of its ``AsyncGRPOTrainer``, and their forward pass on the CPU.

TRL's own code turns a rollout's calls into samples, places them into rows, packs the rows, gathers keys and values, and runs the
fused head. Only the FlashAttention 3 kernel, which needs a GPU, is replaced: by ``varlen_attention``. The calls are exact tokens,
so TRL's chat template, which would render every prompt again, has no part in this.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from bench.peers.batch import Batch
from bench.plain import objective
from bench.synthetic import TokenCall

FORK_THRESHOLD = 1024
"""TRL's default: a prompt that changes fewer tokens of the last answer continues the sample, and does not train that answer."""


def samples_of(group: Sequence[Sequence[TokenCall]], advantages: Sequence[float], group_id: int) -> list[dict]:
    """Return the samples that TRL's rollout worker makes from a group. Raises ImportError without TRL.

    A call that does not continue the sample before it starts a new one, which trains only what it samples itself.
    """
    from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences

    samples = []
    for number, (run, advantage) in enumerate(zip(group, advantages, strict=True)):
        turns = [TurnRecord(list(call.prompt), list(call.sampled), [0.0] * len(call.sampled)) for call in run]
        sequences, _ = _chain_to_sequences(turns, f"rollout{number}", FORK_THRESHOLD)
        for sequence in sequences:
            samples.append({
                "input_ids": np.asarray(sequence.input_ids), "completion_mask": np.asarray(sequence.completion_mask),
                "old_log_probs": np.asarray(sequence.old_log_probs), "advantage": advantage, "group_id": group_id,
                "metrics": {},
            })  # fmt: skip
    return samples


def tree_rows(samples: Sequence[dict], budget: int) -> list[Any]:
    """Return the ``TreeRow`` objects of at most ``budget`` tokens into which TRL's planner places ``samples``."""
    from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher

    longest = max(len(sample["input_ids"]) for sample in samples)
    if longest > budget:
        raise ValueError(f"TRL drops samples longer than a row: {longest} tokens, rows of {budget}")
    batcher = TokenBudgetBatcher(closed(samples, budget), 1, budget, {})
    return [row for rows in batcher for row in rows]


def closed(samples: Sequence[dict], budget: int) -> Iterator[dict]:
    """Yield ``samples``, then one that fills a row and shares nothing: TRL emits a row only when the next sample does not fit."""
    yield from samples
    yield {
        "input_ids": np.full(budget, -1), "completion_mask": np.zeros(budget, dtype=int), "group_id": "end",
    }  # fmt: skip


def tree_row_side(
    model: PreTrainedModel, batch: Batch, budget: int
) -> tuple[Callable[[torch.nn.Module], None], PreTrainedModel, int]:
    """Return the pass over the batch, the model to pass to it, and the tokens it computes. Raises ImportError without TRL.

    The model is a copy, because TRL replaces its forward pass and its attention.
    """
    from trl.experimental.async_grpo import packing
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout
    from trl.trainer.utils import add_fused_lm_head

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)
    packing.register_tree_attention()
    model = copy.deepcopy(model)
    model.set_attn_implementation(packing.TREE_ATTENTION)
    add_fused_lm_head(model)
    rows = tree_rows(samples_of(batch.runs, batch.advantages, 0), budget)
    inputs = [DataCollatorForRollout(pad_token_id=0).torch_call([[row]]) for row in rows]
    trained = sum(row["token_index"].numel() for row in inputs)
    if trained != batch.trained:
        print(f"note: TreeRow trains {trained} of {batch.trained} sampled tokens")

    def step(model: torch.nn.Module) -> None:
        for row in inputs:
            objective(_logprobs(model, row), row["advantages"][0], trained).backward()

    return step, model, sum(len(row.tokens) for row in rows)


def _logprobs(model: torch.nn.Module, row: dict[str, Tensor]) -> Tensor:
    """Return the logprobs of the row's trained tokens, by the arguments that TRL's ``compute_loss`` passes."""
    longest, path = row["tree_max_seqlens"][0].tolist()
    out = model(
        input_ids=row["input_ids"], position_ids=row["position_ids"], shift_labels=row["shift_labels"], fused_lm_head=True,
        tree_kv_index=row["tree_kv_index"][0], tree_cu_seqlens_q=row["tree_cu_seqlens_q"][0],
        tree_cu_seqlens_k=row["tree_cu_seqlens_k"][0], tree_max_seqlen_q=longest, tree_max_seqlen_k=path,
    )  # fmt: skip
    return out.log_probs.flatten()[row["token_index"][0]]


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """Return FlashAttention's causal attention of each segment to its own keys, with a dense mask per segment.

    query: (tokens, heads, size), key and value: (gathered, key heads, size); the ends begin with 0. The last query of a segment
    sees the last of its keys.
    """
    del longest_query, longest_key  # only a kernel needs them
    if not causal or window_size != (-1, -1):
        raise NotImplementedError("only causal attention without a window")
    spans = zip(_spans(query_ends), _spans(key_ends), strict=True)
    return torch.cat([_segment(query[own], key[seen], value[seen], softmax_scale) for own, seen in spans])


def _spans(ends: Tensor) -> list[slice]:
    return [slice(start, end) for start, end in pairwise(ends.tolist())]


def _segment(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    mask = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device).tril(len(key) - len(query))
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None],
        attn_mask=mask, scale=scale, enable_gqa=True,
    )  # fmt: skip
    return out[0].transpose(0, 1)
