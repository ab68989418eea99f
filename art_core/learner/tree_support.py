"""How a model can compute a token tree, found by trying on a small tree at first use, and the masks for its attention.

A token sees its ancestors and itself. In depth-first order its descendants follow it without a gap, so token q sees token k
exactly if k <= q < (end of the subtree of k's node) and, with a sliding window, their depths differ by less than the window.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from art_core.errors import ConfigError
from art_core.learner.head import head_of
from art_core.learner.pretrained import fixed_rope_positions
from art_core.learner.tree_attention import ATTENTION
from art_core.token_tree import build_tree
from art_core.types import Call, TokenTree, Trajectory

logger = logging.getLogger("art_core.learner")

FLEX_BLOCK = 128  # side of a block of FlexAttention's mask in tokens; its default
TOLERANCE = {2: 0.05, 4: 1e-4, 8: 1e-4}
"""By the bytes of a number: logprobs that differ by less on average are equal. Norms and softmax are float32 in any model."""
LAYER_STATES = "art.layer_states"  # entry points: map a model to what plans its layers' states along a tree, or to None
PROBE_PIECE = 5  # tokens of a piece when pieces are tried: cuts the small tree within a segment and between two


@dataclass(frozen=True)
class Support:
    """One way to compute a tree."""

    backend: str
    """``"segments"``: tree_attention.py, for CPUs; ``"flex"``: FlexAttention, for GPUs in 16 bits (its kernel for float32
    compiles for 40 s); ``"dense"``: a (tokens x tokens) mask; ``"paths"``: one row per root-to-leaf path."""
    attention: str = ""
    """transformers' name of the attention that accepts the backend's mask."""
    windows: Mapping[str, int | None] | None = None
    """Layer type -> sliding window in tokens, or None; None as a whole if attention can't follow a tree."""
    states: Any = None
    """What plans the states of layers that carry one along the row, or None."""
    head: bool = False
    """Whether the LM head is computed in chunks, not by the model's own forward pass at the rows needed."""
    pieces: bool = False
    """Whether a tree can be computed piece by piece."""
    trims: bool = False
    """Whether the last layer can leave out the rows that predict no target."""
    positions: int | None = None
    """Trees with more positions are computed path by path, because rotary frequencies then depend on the row's length."""

    @property
    def packs(self) -> bool:
        """Whether several trees cost no more together than apart: not with a dense mask, nor with a row per path."""
        return self.backend in ("segments", "flex")


PATHS = Support("paths")
Compute = Callable[[TokenTree, Support, int | None], Tensor]  # (tree, way, tokens of a piece) -> logprobs (targets,)
_known: WeakKeyDictionary[PreTrainedModel, dict[tuple, Support]] = WeakKeyDictionary()
"""By what the answer depends on: the backend requested, and what can change about a loaded model."""


def support(base: PreTrainedModel, backend: str | None, compute: Compute) -> Support:
    """Return the fastest way in which ``base`` computes the same as row by row, or ``backend``'s.

    Raises ConfigError if the model doesn't compute the same with ``backend``, or isn't causal.
    """
    known = _known.setdefault(base, {})
    key = (backend, base.device.type, base.dtype, bool(head_of(base)))
    if key not in known:
        with _without_dropout(base):
            _check_causal(base, compute)
            known[key] = _find(base, backend, compute)
    return known[key]


def checkpointed(base: PreTrainedModel) -> bool:
    """Return whether layers are computed once more in the backward pass."""
    return base.training and any(getattr(module, "gradient_checkpointing", False) for module in base.modules())


@contextmanager
def attention_of(base: PreTrainedModel, name: str) -> Iterator[None]:
    """Let ``base`` use the attention implementation ``name``."""
    before = base.config._attn_implementation
    base.config._attn_implementation = name
    try:
        yield
    finally:
        # Checkpointed layers compute attention once more in the backward pass.
        if not checkpointed(base):
            base.config._attn_implementation = before


def _find(base: PreTrainedModel, backend: str | None, compute: Compute) -> Support:
    entries = importlib.metadata.entry_points(group=LAYER_STATES)
    states = next((states for entry in entries if (states := entry.load()(base))), None)
    windows = attention_windows(base, states)
    reason = "states that no plugin plans, attention other than full and sliding, or no positions: docs/models.md"
    if windows is not None and backend != "paths":
        with attention_of(base, "eager"):  # the reference: kernels leave out what they can't do
            probe = _Probe(base, compute)
        for candidate in _candidates(base, Support("", windows=windows, states=states), backend):
            reason = probe.problem(candidate)
            if reason is None:
                return replace(_with_extras(probe, candidate), positions=fixed_rope_positions(base.config))
            logger.info("%s: %s with %s is not used: %s", type(base).__name__, candidate.backend, candidate, reason)
    if backend not in (None, "paths"):
        raise ConfigError(f"{type(base).__name__} cannot compute a token tree with backend={backend!r}: {reason}")
    if backend is None:
        name = type(base).__name__
        logger.warning("%s cannot follow a token tree (%s); every root-to-leaf path is computed alone", name, reason)
    chunked = replace(PATHS, head=True)
    return chunked if head_of(base) and _Probe(base, compute).problem(chunked) is None else PATHS


class _Probe:
    """A small tree and its logprobs computed row by row."""

    def __init__(self, base: PreTrainedModel, compute: Compute) -> None:
        self._compute, self._dtype = compute, base.dtype
        self._tree = probe_tree(base.config.get_text_config().vocab_size)
        self._expected = compute(self._tree, PATHS, None)

    def problem(self, way: Support, piece: int | None = None) -> str | None:
        """Return why ``way`` can't be used, or None."""
        try:
            logprobs = self._compute(self._tree, way, piece)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a foreign model may fail in any way here, and another way may work
            return f"{type(error).__name__}: {error}"
        gap = _gap(logprobs, self._expected, self._dtype)
        return None if gap is None else f"its logprobs differ by {gap:.3g} on average from those of its rows"


def _candidates(base: PreTrainedModel, way: Support, backend: str | None) -> Iterator[Support]:
    attentions = {"segments": [ATTENTION], "flex": ["flex_attention"], "dense": ["sdpa", "eager"]}
    fastest = "segments" if base.device.type == "cpu" else "flex" if base.dtype.itemsize == 2 else "dense"
    if getattr(base.config.get_text_config(), "attn_logit_softcapping", None):
        attentions["dense"].remove("sdpa")  # it ignores the cap, which a small tree may not show
    for name in [backend] if backend else dict.fromkeys([fastest, "dense"]):
        if name not in attentions:
            raise ConfigError(f"backend={name!r} is unknown; use one of: {', '.join([*attentions, 'paths'])}")
        for attention in attentions[name]:
            heads = (True, False) if head_of(base) else (False,)
            yield from (replace(way, backend=name, attention=attention, head=head) for head in heads)


def _with_extras(probe: _Probe, way: Support) -> Support:
    """Return ``way`` with ``pieces`` and ``trims`` if they don't change the result."""
    if not way.head:
        return way
    way = replace(way, pieces=probe.problem(way, PROBE_PIECE) is None)
    if way.backend != "segments":
        return way
    trimmed = replace(way, trims=True)
    sizes = (None, PROBE_PIECE) if way.pieces else (None,)
    return way if any(probe.problem(trimmed, size) for size in sizes) else trimmed


def _check_causal(base: PreTrainedModel, compute: Compute) -> None:
    """Raise ConfigError if later tokens change a token's logprob: such a model can't have sampled it."""
    size = base.config.get_text_config().vocab_size
    alone = compute(probe_tree(size, calls=1), PATHS, None)
    extended = compute(probe_tree(size, calls=2), PATHS, None)[: len(alone)]
    if _gap(extended, alone, base.dtype) is not None:
        raise ConfigError(
            f"{type(base).__name__} is not causal as configured: later tokens change a token's logprob, so it can't be a "
            "policy; use a causal language model (some need is_decoder=True in their config.json)"
        )


def _gap(logprobs: Tensor, expected: Tensor, dtype: torch.dtype) -> float | None:
    """Return the mean difference of the logprobs, or None if it is due to rounding."""
    gap = float((logprobs - expected).abs().mean())
    return None if gap <= TOLERANCE[dtype.itemsize] * max(1.0, float(expected.abs().mean())) else gap


def probe_tree(vocabulary: int, calls: int = 4) -> TokenTree:
    """Return the tree of the first of: a call, a turn that extends it, a fork, and a call with another beginning."""
    ids = [(7 * place + 3) % vocabulary for place in range(32)]
    texts = [(ids[:6], ids[6:9]), (ids[:12], ids[12:15]), (ids[:7], ids[20:24]), (ids[24:28], ids[28:32])]
    made = tuple(Call(tuple(prompt), tuple(sampled), (0.0,) * len(sampled)) for prompt, sampled in texts[:calls])
    return build_tree([Trajectory(task=None, calls=made)])


def attention_windows(base: PreTrainedModel, states: Any = None) -> dict[str, int | None] | None:
    """Return layer type -> sliding window in tokens (None: unlimited), or None if the layers can't follow a tree."""
    config = base.config.get_text_config()
    parameters = inspect.signature(base.forward).parameters
    if (not states and (base._is_stateful or "position_ids" not in parameters)) or getattr(config, "alibi", False):
        return None
    if getattr(config, "keep_window_size", None) or getattr(config, "attention_layers", None):
        return None  # Doge keeps the top scores of a whole row; GPT-Neo's windows count positions in the row
    window = getattr(config, "sliding_window", None)
    # The key alone isn't enough: converted checkpoints carry it into architectures that neither declare nor use it.
    alone = "sliding_attention" if window and hasattr(type(config), "sliding_window") else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or [alone])
    kinds = kinds - states.layer_types or {alone} if states else kinds
    if kinds - {"full_attention", "sliding_attention"} or ("sliding_attention" in kinds and not window):
        return None
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


@contextmanager
def _without_dropout(base: PreTrainedModel) -> Iterator[None]:
    """Disable gradients and, only if the model has dropout, switch it to evaluation mode."""
    training = [module for module in base.modules() if module.training]
    dropout = any(getattr(module, name, None) for module in training for name in ("p", "attention_dropout"))
    for module in training if dropout else ():
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


class TreeMask:
    """The masks of a tree, for any range of its tokens as queries and all tokens up to the range's end as keys.

    ``way`` has the backend, the sliding windows, and the plan of layers that carry a state.
    """

    def __init__(self, tree: TokenTree, way: Support, dtype: torch.dtype, device: torch.device) -> None:
        deepest = int(tree.depths.max(initial=0)) + 1
        # A window longer than every path hides nothing.
        self.windows = {kind: window if window and window < deepest else 0 for kind, window in way.windows.items()}
        self.make = {"segments": self._segments, "flex": self._flex, "dense": self._dense}[way.backend]
        self.segments = segments(tree)
        self.depths = tree.depths
        self.ends = np.repeat(_subtree_ends(tree), np.diff(tree.node_starts))
        """(tokens,): end of the subtree of each token's node."""
        self.dtype, self.device, self.states = dtype, device, way.states(tree) if way.states else None

    def rows(self, start: int, stop: int) -> Any:
        """Return the mask of queries ``start`` to ``stop``, or a dict of masks if the model has several layer types."""
        made = {window: self.make(start, stop, window) for window in set(self.windows.values())}
        masks = {kind: made[window] for kind, window in self.windows.items()}
        if self.states and (len(masks) > 1 or self.make == self._flex):  # transformers can't derive others from these
            masks |= dict.fromkeys(self.states.layer_types)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _segments(self, start: int, stop: int, window: int) -> Tensor:
        column = np.full((len(self.segments), 1), window, dtype=np.int64)
        return torch.from_numpy(np.concatenate([self.segments, column], axis=1))[None, None]

    def _dense(self, start: int, stop: int, window: int) -> Tensor:
        queries = torch.arange(start, stop, device=self.device)[:, None]
        keys = torch.arange(stop, device=self.device)
        depths, ends = self._on_device()
        seen = (keys <= queries) & (queries < ends[:stop])
        if window:
            seen &= depths[queries] - depths[:stop] < window
        # Additive and finite: eager attention adds the mask, and -inf makes NaN if a whole block is masked.
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen, torch.finfo(self.dtype).min)[None, None]

    def _flex(self, start: int, stop: int, window: int) -> Any:
        from torch.nn.attention.flex_attention import BlockMask

        depths, ends = self._on_device()

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            row = query + start
            seen = (key <= row) & (row < ends[key])
            return seen & (depths[row] - depths[key] < window) if window else seen

        partial, full = flex_blocks(self.depths, self.ends, start, stop, window)
        return BlockMask.from_kv_blocks(
            *(self._listed(partial)), *(self._listed(full)),
            BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=(stop - start, stop),
        )  # fmt: skip

    def _listed(self, blocks: np.ndarray) -> tuple[Tensor, Tensor]:
        """(query blocks, key blocks) bool -> each row's number of key blocks, and their indices at the start of each row."""
        counts = torch.from_numpy(blocks.sum(1, dtype=np.int32)).to(self.device)
        numbers = torch.from_numpy(np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)).to(self.device)
        return counts[None, None], numbers[None, None]

    def _on_device(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.depths).to(self.device), torch.from_numpy(self.ends).to(self.device)


def segments(tree: TokenTree) -> np.ndarray:
    """Return (segments, 4) int64: start, end, end of the descendants, depth of the first token.

    A segment is a node with its only child, that child's only child, and so on.
    """
    children = np.bincount(tree.node_parents[tree.node_parents >= 0], minlength=len(tree.node_parents))
    starts, ends = tree.node_starts[:-1], tree.node_starts[1:]
    alone = (tree.node_parents >= 0) & (children[tree.node_parents] == 1)
    heads = np.flatnonzero(~alone)
    tails = np.append(heads[1:], len(starts)) - 1  # an only child follows its parent directly
    last = _subtree_ends(tree)[heads] if len(heads) else np.empty(0, np.int64)
    return np.stack([starts[heads], ends[tails], last, tree.depths[starts[heads]]], axis=1)


def flex_blocks(
    depths: np.ndarray, ends: np.ndarray, start: int, stop: int, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return which blocks of (queries ``start`` to ``stop``, keys 0 to ``stop``) are seen partly, and which fully.

    Both are (query blocks, key blocks) bool. A partly seen block may have nothing to see: the mask decides.
    """
    size = FLEX_BLOCK
    row_first = np.arange(start, stop, size)
    row_last = np.minimum(row_first + size, stop) - 1
    key_first = np.arange(0, stop, size)
    key_last = np.minimum(key_first + size, stop) - 1
    longest, shortest = np.maximum.reduceat(ends[:stop], key_first), np.minimum.reduceat(ends[:stop], key_first)
    some = (key_first <= row_last[:, None]) & (row_first[:, None] < longest)
    whole = (key_last <= row_first[:, None]) & (row_last[:, None] < shortest)
    if window:
        row_deepest = np.maximum.reduceat(depths[start:stop], row_first - start)[:, None]
        row_shallowest = np.minimum.reduceat(depths[start:stop], row_first - start)[:, None]
        some &= row_shallowest - np.maximum.reduceat(depths[:stop], key_first) < window
        whole &= row_deepest - np.minimum.reduceat(depths[:stop], key_first) < window
    return some & ~whole, whole


def _subtree_ends(tree: TokenTree) -> np.ndarray:
    """Return where each node's subtree ends."""
    ends = tree.node_starts[1:].copy()
    for node in range(len(ends) - 1, -1, -1):
        parent = tree.node_parents[node]
        if parent >= 0:
            ends[parent] = max(ends[parent], ends[node])
    return ends
