"""One forward pass over a token tree: logprobs of its targets. Knows nothing about rewards, losses or optimizers.

A token sees its ancestors and itself, its position is its depth, and a sliding window is a distance in depth; so every
target has the logprob, and every weight the gradient, that the calls would have on their own. The tokens are computed in
depth-first order, a piece at a time, each piece with the keys and values of all before it; which pieces changes nothing.
Models whose layers carry state along the row (linear attention, convolutions) or take no positions get one row per
root-to-leaf path instead.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicLayer, PreTrainedModel

from art_core.learner.head import Targets, head_of, logprobs_of
from art_core.learner.last_layer import only_rows
from art_core.learner.pretrained import has_adapter
from art_core.learner.tree_mask import TreeMask
from art_core.learner.tree_support import PATHS, Support, attention_of, support
from art_core.types import TokenTree

logger = logging.getLogger("art_core.learner")

CACHE_FRIENDLY = 2**22
"""Activations of one kind in a piece, on a CPU: beyond 16 MiB a tensor the allocator hands pages back to the system and
fetches them again, which costs a tenth of the step."""

ROPE_DEPENDS = (
    "beyond {} positions its rotary embedding depends on a row's length, so such trees are computed path by path; calls "
    "that end before their path does may differ from what was sampled"
)
MOST_PIECES = 8
"""Where all activations are kept: every piece keeps the keys and values of those before it."""


class TreeOutputs(NamedTuple):
    """What one forward pass gives."""

    logprobs: Tensor
    """(targets,): of each target at its temperature; differentiable."""
    entropy: Tensor | None
    """(targets,): in nats, of the distribution that each was sampled from; None where the model's own head ran."""


def tree_logprobs(
    model: torch.nn.Module, tree: TokenTree, *, weighted_only: bool = False, backend: str | None = None
) -> Tensor:
    """Return the logprob of every target at its temperature: (num_targets,), differentiable; float32 or float64.

    ``model`` is a transformers causal LM, with or without PEFT adapters; it is used in the mode (train or eval) it is in.
    The order is the tree's: trajectory, call, position. ``weighted_only`` leaves out the targets of weight 0, and with
    them their part of the LM head. ``backend`` is ``"segments"``, ``"flex"``, ``"dense"`` or ``"paths"``; None takes the
    fastest with which the model computes what it computes row by row.
    """
    return tree_outputs(model, tree, weighted_only=weighted_only, backend=backend).logprobs


def tree_outputs(
    model: torch.nn.Module,
    tree: TokenTree,
    *,
    weighted_only: bool = False,
    backend: str | None = None,
    max_tokens: int | None = None,
) -> TreeOutputs:
    """``tree_logprobs`` with entropies. Of a tree of more than ``max_tokens`` no more tokens' activations are kept.

    Its pieces are then computed again in the backward pass; only keys and values are kept of the others. Where a model
    is computed path by path, a path is a piece; one that can only be computed whole is, which is said once.
    """
    targets = np.flatnonzero(tree.weights) if weighted_only else np.arange(tree.num_targets)
    base = _base(model)
    if not len(targets):
        return TreeOutputs(torch.zeros(0, device=_device(base)), None)
    way = way_of(model, backend)
    if way.positions and tree.depths.max(initial=0) >= way.positions:
        _say_once(base, ROPE_DEPENDS.format(way.positions))
        way = PATHS
    if base.is_gradient_checkpointing and base.training:
        # Layers that are checkpointed one by one take no cache, which is what a piece knows the others by, and are
        # computed once more when nothing says any longer which rows are wanted.
        way = replace(way, pieces=False, trims=False)
    whole = not way.pieces
    recompute = max_tokens is not None and tree.num_tokens > max_tokens and torch.is_grad_enabled()
    if recompute and whole and way.backend != "paths":
        recompute = False
        _say_once(base, "it cannot be computed in pieces, so max_tokens_per_pass does not bound a single tree")
    piece = tree.num_tokens if whole else max_tokens if recompute else _piece_tokens(base, tree)
    return _compute(base, tree, targets, way, piece, recompute)


def way_of(model: torch.nn.Module, backend: str | None = None) -> Support:
    """Return how ``tree_logprobs`` computes ``model``; tried at the first call for a model."""
    base = _base(model)

    def compute(tree: TokenTree, way: Support, piece: int | None) -> Tensor:
        return _compute(base, tree, np.arange(tree.num_targets), way, piece or tree.num_tokens, False).logprobs

    return support(base, backend, compute)


def _compute(
    base: PreTrainedModel, tree: TokenTree, targets: np.ndarray, way: Support, piece: int, recompute: bool
) -> TreeOutputs:
    """Compute ``targets`` in this ``way``; ``recompute`` keeps no activations but keys and values."""
    if way.backend == "paths":
        return _path_by_path(base, tree, targets, way.head, recompute)
    masks = TreeMask(tree, way.windows, way.backend, base.dtype, _device(base))
    if way.head:
        return _piece_by_piece(base, tree, targets, way, masks, piece, recompute)
    with attention_of(base, way.attention):
        inputs = _inputs(base, tree, masks, 0, tree.num_tokens)
        return TreeOutputs(_by_own_head(base, inputs, tree, targets, tree.target_contexts[targets]), None)


def _piece_by_piece(
    base: PreTrainedModel,
    tree: TokenTree,
    targets: np.ndarray,
    way: Support,
    masks: TreeMask,
    size: int,
    recompute: bool,
) -> TreeOutputs:
    """Run the decoder over the tree's pieces, then the head over the rows that predict a target."""
    device = _device(base)
    rows = _Rows(tree, targets, tree.target_contexts[targets])
    past: list[Tensor] = []
    hidden = []
    for number, start in enumerate(range(0, tree.num_tokens, size)):
        stop = min(start + size, tree.num_tokens)
        keep = rows.columns[slice(*np.searchsorted(rows.columns, (start, stop)))] - start
        inputs = _inputs(base, tree, masks, start, stop)
        # Not every model that can be a tree has a cache that can.
        pieces = None if size >= tree.num_tokens else number
        arguments = (base, way, inputs, _tensor(keep, device), pieces, *past)
        states, *new = checkpoint(_piece, *arguments, use_reentrant=False) if recompute else _piece(*arguments)
        hidden.append(states)
        past.extend(new)
    logprobs, entropy = logprobs_of(torch.cat(hidden), head_of(base), rows.targets(tree, device))
    back = _tensor(rows.back, device)
    return TreeOutputs(logprobs[back], entropy[back])


def _piece(
    base: PreTrainedModel, way: Support, inputs: dict[str, Any], keep: Tensor, pieces: int | None, *past: Tensor
) -> tuple[Tensor, ...]:
    """Return the hidden states of ``keep`` and the piece's keys and values, layer by layer.

    ``past`` holds those of the ``pieces`` before it, one piece after the other; None: the only piece.
    """
    trimmed = only_rows(base, keep) if way.trims else nullcontext()
    with attention_of(base, way.attention), trimmed:  # here, because the backward pass may come by again
        decoder = base.get_decoder()
        if pieces is None:
            return (decoder(**inputs, use_cache=False).last_hidden_state[0, keep],)
        width = 2 * base.config.get_text_config().num_hidden_layers
        layers = [_Layer(past[2 * number :: width], past[2 * number + 1 :: width]) for number in range(width // 2)]
        states = decoder(**inputs, past_key_values=Cache(layers=layers), use_cache=True).last_hidden_state
        return states[0, keep], *(tensor for layer in layers for tensor in layer.own)


class _Layer(DynamicLayer):
    """Keys and values of one layer: those of the pieces before, and those of this one."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        super().__init__()
        self.before = keys, values
        self.own: tuple[Tensor, Tensor]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.own = key_states, value_states
        keys, values = self.before
        if not keys:
            return self.own  # torch.cat would copy them
        return torch.cat([*keys, key_states], dim=-2), torch.cat([*values, value_states], dim=-2)

    def get_seq_length(self) -> int:
        return sum(keys.shape[-2] for keys in self.before[0])


def _inputs(base: PreTrainedModel, tree: TokenTree, masks: TreeMask, start: int, stop: int) -> dict[str, Any]:
    device = _device(base)
    return {
        "input_ids": _tensor(tree.tokens[start:stop], device)[None],
        "position_ids": _tensor(tree.depths[start:stop], device)[None],
        "attention_mask": masks.rows(start, stop),
    }


def _piece_tokens(base: PreTrainedModel, tree: TokenTree) -> int:
    """Return the tokens of a piece where all activations are kept."""
    if _device(base).type != "cpu":
        return tree.num_tokens
    config = base.config.get_text_config()
    widest = max(config.hidden_size, getattr(config, "intermediate_size", None) or 0)
    return -(-tree.num_tokens // min(MOST_PIECES, -(-tree.num_tokens * widest // CACHE_FRIENDLY)))


class _Rows:
    """Targets with one context and one temperature share a row of logits."""

    def __init__(self, tree: TokenTree, targets: np.ndarray, columns: np.ndarray) -> None:
        key = np.stack([columns, tree.temperatures[targets].view(np.int32)])
        unique, first, row = np.unique(key, axis=1, return_index=True, return_inverse=True)
        self.columns = unique[0]
        """(rows,): where each row's context stands, ascending; twice where two temperatures share it."""
        self.temperatures = tree.temperatures[targets[first]]
        by_row = np.argsort(row, kind="stable")
        self.rows, self.members = row[by_row], targets[by_row]
        self.back = np.argsort(by_row)
        """Puts what was computed in the order of rows back into that of ``targets``."""

    def targets(self, tree: TokenTree, device: torch.device) -> Targets:
        tokens = tree.tokens[tree.target_tokens[self.members]]
        return Targets(_tensor(self.rows, device), _tensor(tokens, device), _tensor(self.temperatures, device))


def _by_own_head(
    base: PreTrainedModel, inputs: dict[str, Any], tree: TokenTree, targets: np.ndarray, columns: np.ndarray
) -> Tensor:
    """Run the whole model; the contexts of ``targets`` stand in ``columns`` of the input row."""
    device = inputs["input_ids"].device
    rows = _Rows(tree, targets, columns)
    keep = _tensor(rows.columns, device)
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        logits = base(**inputs, use_cache=False, logits_to_keep=keep).logits[0]
        if len(logits) != len(keep):  # Unsloth's forward for GPUs keeps all where it is given a tensor
            logits = logits[keep]
    else:
        logits = base(**inputs, use_cache=False).logits[0, keep]
    wanted = rows.targets(tree, device)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / wanted.temperatures[:, None]
    logprobs = scores[wanted.rows, wanted.tokens] - scores.logsumexp(-1)[wanted.rows]
    return logprobs[_tensor(rows.back, device)]


def _path_by_path(
    base: PreTrainedModel, tree: TokenTree, targets: np.ndarray, chunked: bool, recompute: bool
) -> TreeOutputs:
    """Compute every path in a row of its own, the head in chunks where ``chunked``."""
    device = _device(base)
    logprobs, entropies, order = [], [], []
    for path, members in _paths(tree, targets):
        ids = _tensor(tree.tokens[path], device)[None]
        columns = tree.depths[tree.target_contexts[members]]
        if chunked:
            rows = _Rows(tree, members, columns)
            arguments = (base, ids, _tensor(rows.columns, device))
            hidden = checkpoint(_row, *arguments, use_reentrant=False) if recompute else _row(*arguments)
            found, entropy = logprobs_of(hidden, head_of(base), rows.targets(tree, device))
            back = _tensor(rows.back, device)
            logprobs.append(found[back])
            entropies.append(entropy[back])
        else:
            arguments = (base, {"input_ids": ids}, tree, members, columns)
            logprobs.append(
                checkpoint(_by_own_head, *arguments, use_reentrant=False) if recompute else _by_own_head(*arguments)
            )
        order.append(members)
    back = _tensor(np.argsort(np.concatenate(order)), device)
    return TreeOutputs(torch.cat(logprobs)[back], torch.cat(entropies)[back] if chunked else None)


def _row(base: PreTrainedModel, ids: Tensor, keep: Tensor) -> Tensor:
    return base.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0, keep]


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


def _say_once(base: PreTrainedModel, what: str) -> None:
    said = _said.setdefault(base, set())
    if what not in said:
        said.add(what)
        logger.warning("%s: %s", type(base).__name__, what)


_said: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()


def _base(model: torch.nn.Module) -> PreTrainedModel:
    return model.get_base_model() if has_adapter(model) else model


def _device(base: PreTrainedModel) -> torch.device:
    return base.get_input_embeddings().weight.device


def _tensor(array: Sequence[float] | np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
