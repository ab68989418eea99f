"""One forward pass over a token tree: logprobs of its targets. Knows nothing about rewards, losses or optimizers.

A token sees its ancestors and itself, its position is its depth, and a sliding window is a distance in depth; so every
target has the logprob, and every weight the gradient, that the calls would have on their own. Models whose layers carry
state along the row (linear attention, convolutions) or take no positions get one row per root-to-leaf path instead.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from art_core.types import TokenTree

logger = logging.getLogger("art_core.learner")

CHUNK = 2**24
"""Most logits that are copied to float32 at a time: 64 MiB."""


def tree_logprobs(model: torch.nn.Module, tree: TokenTree, *, weighted_only: bool = False) -> Tensor:
    """Return the logprob of every target at its temperature: (num_targets,) float32, differentiable.

    ``model`` is a transformers causal LM, with or without PEFT adapters; it is used in the mode (train or eval) it is in.
    The order is the tree's: trajectory, call, position. ``weighted_only`` leaves out the targets of weight 0, and with
    them their part of the LM head.
    """
    targets = np.flatnonzero(tree.weights) if weighted_only else np.arange(tree.num_targets)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    device = base.get_input_embeddings().weight.device
    if not len(targets):
        return torch.zeros(0, device=device)
    windows = _attention_windows(base)
    if windows is not None:
        inputs = {
            "input_ids": _tensor(tree.tokens, device)[None],
            "position_ids": _tensor(tree.depths, device)[None],
            "attention_mask": _attention_mask(tree, windows, base.dtype, device),
        }
        return _logprobs(model, inputs, tree, targets, tree.target_contexts[targets])
    _say_once(type(base).__name__)
    parts, order = [], []
    for path, members in _paths(tree, targets):
        inputs = {"input_ids": _tensor(tree.tokens[path], device)[None]}
        parts.append(_logprobs(model, inputs, tree, members, tree.depths[tree.target_contexts[members]]))
        order.append(members)
    back = np.argsort(np.concatenate(order))
    return torch.cat(parts)[_tensor(back, device)]


def _logprobs(
    model: torch.nn.Module, inputs: dict, tree: TokenTree, targets: np.ndarray, columns: np.ndarray
) -> Tensor:
    """Run ``model`` and return the logprobs of ``targets``, whose contexts stand in ``columns`` of the input row."""
    # Targets with one context and one temperature share a row of logits and its normaliser.
    key = np.stack([columns, tree.temperatures[targets].view(np.int32)])
    unique, first, row = np.unique(key, axis=1, return_index=True, return_inverse=True)
    device = inputs["input_ids"].device
    keep = _tensor(unique[0], device)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        logits = model(**inputs, use_cache=False, logits_to_keep=keep).logits[0]
        if len(logits) != len(keep):  # Unsloth's forward for GPUs keeps all where it is given a tensor
            logits = logits[keep]
    else:
        logits = model(**inputs, use_cache=False).logits[0, keep]
    temperatures = tree.temperatures[targets[first]]
    by_row = np.argsort(row, kind="stable")
    tokens = tree.tokens[tree.target_tokens[targets[by_row]]]
    size = max(1, CHUNK // logits.shape[-1])
    bounds = np.searchsorted(row[by_row], np.arange(0, len(keep) + size, size))
    parts = []
    for number, chunk in enumerate(logits.split(size)):
        members = slice(bounds[number], bounds[number + 1])
        scale = temperatures[number * size :][: len(chunk)]
        scores = chunk.float()
        if (scale != 1).any():
            scores = scores / _tensor(scale, device)[:, None]
        local = _tensor(row[by_row][members] - number * size, device)
        parts.append(scores[local, _tensor(tokens[members], device)] - scores.logsumexp(-1)[local])
    return torch.cat(parts)[_tensor(np.argsort(by_row), device)]


def _attention_windows(base: PreTrainedModel) -> dict[str, int | None] | None:
    """Return layer type -> sliding window in tokens (None: unlimited), or None where attention cannot be a tree."""
    config = base.config.get_text_config()
    if (
        getattr(base, "one_row_per_path", False)
        or base._is_stateful
        or "position_ids" not in inspect.signature(base.forward).parameters
        or config._attn_implementation not in ("sdpa", "eager")
        or getattr(config, "alibi", False)
    ):
        return None
    window = getattr(config, "sliding_window", None)
    # The key alone says little: converted checkpoints carry it into architectures that do not declare and do not use it.
    alone = "sliding_attention" if window and hasattr(type(config), "sliding_window") else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or [alone])
    if kinds - {"full_attention", "sliding_attention"} or ("sliding_attention" in kinds and not window):
        return None
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}


def _attention_mask(
    tree: TokenTree, windows: dict[str, int | None], dtype: torch.dtype, device: torch.device
) -> Tensor | dict[str, Tensor]:
    """Return additive masks (1, 1, num_tokens, num_tokens), by layer type where the model has several."""
    position = torch.arange(tree.num_tokens, device=device)
    depths = _tensor(tree.depths, device)
    ends = _tensor(np.repeat(_subtree_ends(tree), np.diff(tree.node_starts)), device)
    # Depth-first order: a token's descendants are the rest of its node and what follows up to the end of the subtree.
    seen = (position[:, None] >= position) & (position[:, None] < ends)
    masks = {}
    for kind, window in windows.items():
        visible = seen if window is None else seen & (depths[:, None] - depths < window)
        # Additive and finite: eager attention adds the mask, and -inf makes NaN where a whole block is masked.
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, torch.finfo(dtype).min)
        masks[kind] = mask[None, None]
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _subtree_ends(tree: TokenTree) -> np.ndarray:
    """Return, per node, where the tokens of its subtree end."""
    ends = tree.node_starts[1:].copy()
    for node in range(len(ends) - 1, -1, -1):
        parent = tree.node_parents[node]
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[node])
    return ends


def _paths(tree: TokenTree, targets: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the token indices of root-to-leaf paths that together hold ``targets``, each with the targets taken from it."""
    nodes = np.searchsorted(tree.node_starts, tree.target_tokens[targets], side="right") - 1
    leaves = np.arange(len(tree.node_parents))
    for node in range(len(leaves) - 1, -1, -1):
        parent = tree.node_parents[node]
        if parent >= 0:
            leaves[parent] = leaves[node]  # in the end that of the first child
    for leaf in np.unique(leaves[nodes]):
        path, node = [], leaf
        while node >= 0:
            path.append(np.arange(tree.node_starts[node], tree.node_starts[node + 1]))
            node = tree.node_parents[node]
        yield np.concatenate(path[::-1]), targets[leaves[nodes] == leaf]


@cache
def _say_once(model: str) -> None:
    logger.warning(
        "the attention of %s cannot follow a token tree; every root-to-leaf path is computed on its own", model
    )


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
