"""One forward pass over a token tree: logprobs of its targets.

A token sees its ancestors and itself, its position is its depth, and a sliding window is a distance in depth; so every
target has the logprob, and every weight the gradient, that the calls would have on their own. The tokens are computed in
depth-first order, a piece at a time, each piece with the keys and values of all before it; the cuts don't change the result.
Layers that carry a state along the row follow the tree if a plugin plans their states (``LAYER_STATES``). Other models get a
row for each root-to-leaf path.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
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
from art_core.learner.pretrained import cache_argument, has_adapter
from art_core.learner.tree_attention import only_rows
from art_core.learner.tree_support import PATHS, Support, TreeMask, attention_of, checkpointed, support
from art_core.types import TokenTree

logger = logging.getLogger("art_core.learner")

CACHE_FRIENDLY = 2**22
"""Activations of one kind per piece on a CPU: beyond 16 MiB per tensor the allocator returns pages to the system and fetches
them again, which costs a tenth of the step."""
MOST_PIECES = 8  # if all activations are kept: every piece keeps the keys and values of those before it
_warned: WeakKeyDictionary[PreTrainedModel, set[str]] = WeakKeyDictionary()
ROPE_DEPENDS = (
    "beyond {} positions its rotary embedding depends on a row's length, so such trees are computed path by path; calls "
    "that end before their path does may differ from what was sampled"
)


class TreeOutputs(NamedTuple):
    """Results of one forward pass, (targets,) each."""

    logprobs: Tensor
    """Each target's logprob at its temperature; differentiable."""
    entropy: Tensor | None
    """In nats, of each target's distribution; None if the model's own head ran."""


def tree_logprobs(
    model: torch.nn.Module, tree: TokenTree, *, weighted_only: bool = False, backend: str | None = None
) -> Tensor:
    """Return the logprob of every target at its temperature: (num_targets,), differentiable; float32 or float64.

    ``model`` is a transformers causal LM, with or without PEFT adapters, and stays in its mode (train or eval). The order is
    the tree's: trajectory, call, position. ``weighted_only`` leaves out targets of weight 0 and their part of the LM head.
    ``backend`` is ``"segments"``, ``"flex"``, ``"dense"`` or ``"paths"``; None chooses the fastest with which the model
    computes the same as row by row. Raises ConfigError if the model can't be computed with ``backend`` or isn't causal.
    """
    return tree_outputs(model, tree, weighted_only=weighted_only, backend=backend).logprobs


def tree_outputs(
    model: torch.nn.Module, tree: TokenTree, *, weighted_only: bool = False, backend: str | None = None,
    max_tokens: int | None = None,
) -> TreeOutputs:  # fmt: skip
    """``tree_logprobs`` with entropies, keeping the activations of at most ``max_tokens`` tokens.

    The pieces of a larger tree keep only keys and values and are recomputed in the backward pass. If the model is computed
    path by path, a path is a piece; if it can't be computed in pieces, that is logged once and the tree is computed whole.
    """
    targets = np.flatnonzero(tree.weights) if weighted_only else np.arange(tree.num_targets)
    base = _base(model)
    if not len(targets):
        return TreeOutputs(torch.zeros(0, device=_device(base)), None)
    way = way_of(model, backend)
    if way.positions and tree.depths.max(initial=0) >= way.positions:
        _warn_once(base, ROPE_DEPENDS.format(way.positions))
        way = PATHS
    if checkpointed(base):
        # Layers that are checkpointed one by one accept no cache, by which a piece sees the pieces before it, and are
        # recomputed after ``only_rows`` has ended.
        way = replace(way, pieces=False, trims=False)
    recompute = max_tokens is not None and tree.num_tokens > max_tokens and torch.is_grad_enabled()
    if recompute and not way.pieces and way.backend != "paths":
        recompute = False
        _warn_once(base, "it cannot be computed in pieces, so max_tokens_per_pass does not bound a single tree")
    piece = tree.num_tokens if not way.pieces else max_tokens if recompute else _piece_tokens(base, tree)
    return _compute(base, tree, targets, way, piece, recompute)


def way_of(model: torch.nn.Module, backend: str | None = None) -> Support:
    """Return how ``tree_logprobs`` computes ``model``; determined by trying at the first call for a model."""
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
    masks = TreeMask(tree, way, base.dtype, _device(base))
    rows = _Rows(tree, targets, tree.target_contexts[targets], _device(base))
    if way.head:
        return _piece_by_piece(base, tree, rows, way, masks, piece, recompute)
    with attention_of(base, way.attention):
        return TreeOutputs(_by_own_head(base, _inputs(base, tree, masks, 0, tree.num_tokens), rows), None)


def _piece_by_piece(
    base: PreTrainedModel, tree: TokenTree, rows: _Rows, way: Support, masks: TreeMask, size: int, recompute: bool
) -> TreeOutputs:
    """Run the decoder over the tree's pieces, then the head over the rows that predict a target."""
    past: list[Tensor] = []
    hidden = []
    for start in range(0, tree.num_tokens, size):
        stop = min(start + size, tree.num_tokens)
        keep = rows.columns[slice(*np.searchsorted(rows.columns, (start, stop)))] - start
        inputs = _inputs(base, tree, masks, start, stop)
        # Some models can compute a tree but have no cache that can.
        cached = size < tree.num_tokens
        states, *new = _run(_piece, base, way, inputs, _tensor(keep, _device(base)), cached, *past, recompute=recompute)
        hidden.append(states)
        past.extend(new)
    return rows.outputs(base, torch.cat(hidden))


def _piece(
    base: PreTrainedModel, way: Support, inputs: dict[str, Any], keep: Tensor, cached: bool, *past: Tensor
) -> tuple[Tensor, ...]:
    """Return the hidden states of ``keep``, and if ``cached`` the piece's keys and values layer by layer.

    ``past`` holds the keys and values of the pieces before it, one piece after another.
    """
    trimmed = only_rows(base, keep) if way.trims else nullcontext()
    with attention_of(base, way.attention), trimmed:  # here, because the backward pass may run this again
        decoder = base.get_decoder()
        if not cached:
            return (decoder(**inputs, use_cache=False).last_hidden_state[0, keep],)
        # Keys and values; beside a state, the inputs of its convolution and the state itself too.
        make, each = (inputs["seq_idx"].layer, 4) if "seq_idx" in inputs else (PieceLayer, 2)
        width = each * base.config.get_text_config().num_hidden_layers
        layers = [make(*(past[first + n :: width] for n in range(each))) for first in range(0, width, each)]
        states = decoder(**inputs, **{cache_argument(decoder): Cache(layers=layers)}, use_cache=True).last_hidden_state
        return states[0, keep], *(tensor for layer in layers for tensor in layer.own)


class PieceLayer(DynamicLayer):
    """A layer's keys and values: those of the pieces before, and this piece's own."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        super().__init__()
        self.before = keys, values
        self.own: tuple[Tensor, ...]

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.own = key_states, value_states
        keys, values = self.before
        if not keys:
            return self.own  # torch.cat would copy them
        return torch.cat([*keys, key_states], dim=-2), torch.cat([*values, value_states], dim=-2)

    def get_seq_length(self) -> int:
        return sum(keys.shape[-2] for keys in self.before[0])


def _run(function: Callable[..., Any], *arguments: Any, recompute: bool) -> Any:
    """Call ``function``; with ``recompute`` its activations are computed again in the backward pass instead of kept."""
    return checkpoint(function, *arguments, use_reentrant=False) if recompute else function(*arguments)


def _inputs(base: PreTrainedModel, tree: TokenTree, masks: TreeMask, start: int, stop: int) -> dict[str, Any]:
    inputs = {
        "input_ids": _tensor(tree.tokens[start:stop], _device(base))[None],
        "position_ids": _tensor(tree.depths[start:stop], _device(base))[None],
        "attention_mask": masks.rows(start, stop),
    }
    if masks.states:
        inputs["seq_idx"] = masks.states.piece(start, stop, _device(base))
    return inputs


def _piece_tokens(base: PreTrainedModel, tree: TokenTree) -> int:
    """Return the tokens of a piece if all activations are kept."""
    if _device(base).type != "cpu":
        return tree.num_tokens
    config = base.config.get_text_config()
    widest = max(config.hidden_size, getattr(config, "intermediate_size", None) or 0)
    return -(-tree.num_tokens // min(MOST_PIECES, -(-tree.num_tokens * widest // CACHE_FRIENDLY)))


class _Rows:
    """The rows of logits that ``targets`` need: those with one context and one temperature share a row."""

    def __init__(self, tree: TokenTree, targets: np.ndarray, columns: np.ndarray, device: torch.device) -> None:
        """``columns`` are the positions of the targets' contexts in the input."""
        key = np.stack([columns, tree.temperatures[targets].view(np.int32)])
        unique, first, row = np.unique(key, axis=1, return_index=True, return_inverse=True)
        self.columns = unique[0]
        """(rows,): position of each row's context, ascending; twice if two temperatures share it."""
        by_row = np.argsort(row, kind="stable")
        tokens, temperatures = tree.tokens[tree.target_tokens[targets[by_row]]], tree.temperatures[targets[first]]
        self.targets = Targets(_tensor(row[by_row], device), _tensor(tokens, device), _tensor(temperatures, device))
        self.order = _tensor(np.argsort(by_row), device)
        """Restores the order of ``targets``."""

    def outputs(self, base: PreTrainedModel, hidden: Tensor) -> TreeOutputs:
        """Run the head in chunks over the hidden states of ``columns``."""
        logprobs, entropy = logprobs_of(hidden, head_of(base), self.targets)
        return TreeOutputs(logprobs[self.order], entropy[self.order])


def _by_own_head(base: PreTrainedModel, inputs: dict[str, Any], rows: _Rows) -> Tensor:
    """Run the whole model with its own head and return the targets' logprobs."""
    keep = _tensor(rows.columns, inputs["input_ids"].device)
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        logits = base(**inputs, use_cache=False, logits_to_keep=keep).logits[0]
        if len(logits) != len(keep):  # Unsloth's forward for GPUs ignores a tensor and keeps all
            logits = logits[keep]
    else:
        logits = base(**inputs, use_cache=False).logits[0, keep]
    targets = rows.targets
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / targets.temperatures[:, None]
    logprobs = scores[targets.rows, targets.tokens] - scores.logsumexp(-1)[targets.rows]
    return logprobs[rows.order]


def _path_by_path(
    base: PreTrainedModel, tree: TokenTree, targets: np.ndarray, chunked: bool, recompute: bool
) -> TreeOutputs:
    """Compute every path in a row of its own, with the head in chunks if ``chunked``."""
    device = _device(base)
    outputs, order = [], []
    for path, members in paths(tree, targets):
        ids = _tensor(tree.tokens[path], device)[None]
        rows = _Rows(tree, members, tree.depths[tree.target_contexts[members]], device)
        if chunked:
            hidden = _run(_hidden_states, base, ids, _tensor(rows.columns, device), recompute=recompute)
            outputs.append(rows.outputs(base, hidden))
        else:
            outputs.append((_run(_by_own_head, base, {"input_ids": ids}, rows, recompute=recompute), None))
        order.append(members)
    back = _tensor(np.argsort(np.concatenate(order)), device)
    logprobs, entropies = zip(*outputs, strict=True)
    return TreeOutputs(torch.cat(logprobs)[back], torch.cat(entropies)[back] if chunked else None)


def _hidden_states(base: PreTrainedModel, ids: Tensor, keep: Tensor) -> Tensor:
    return base.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0, keep]


def paths(tree: TokenTree, targets: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield root-to-leaf paths (token indices) that together hold ``targets``, each with the targets computed on it."""
    nodes = np.searchsorted(tree.node_starts, tree.target_tokens[targets], side="right") - 1
    leaves = np.arange(len(tree.node_parents))
    for node in range(len(leaves) - 1, -1, -1):
        parent = tree.node_parents[node]
        if parent >= 0:
            leaves[parent] = leaves[node]  # in the end the first child's
    for leaf in np.unique(leaves[nodes]):
        path, node = [], leaf
        while node >= 0:
            path.append(np.arange(tree.node_starts[node], tree.node_starts[node + 1]))
            node = tree.node_parents[node]
        yield np.concatenate(path[::-1]), targets[leaves[nodes] == leaf]


def _warn_once(base: PreTrainedModel, message: str) -> None:
    if message not in (warned := _warned.setdefault(base, set())):
        warned.add(message)
        logger.warning("%s: %s", type(base).__name__, message)


def _base(model: torch.nn.Module) -> PreTrainedModel:
    return model.get_base_model() if has_adapter(model) else model


def _device(base: PreTrainedModel) -> torch.device:
    return base.get_input_embeddings().weight.device


def _tensor(array: Sequence[float] | np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
