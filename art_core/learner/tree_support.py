"""How a model can compute a token tree: tried on a small tree at first use, against the model's own rows, and remembered.

Knows nothing about tasks, losses or training.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from art_core.errors import ConfigError
from art_core.learner.head import head_of
from art_core.learner.tree_attention import ATTENTION
from art_core.token_tree import build_tree
from art_core.types import Call, TokenTree, Trajectory

logger = logging.getLogger("art_core.learner")

TOLERANCE = {2: 0.05, 4: 1e-4, 8: 1e-4}
"""By the bytes of a number: logprobs that differ by less, relative to the largest, are equal. Models compute norms and
softmax in float32 even where their weights are float64."""
PROBE_PIECE = 5
"""Tokens of a piece when pieces are tried: the small tree has several, cut within a segment and between two."""


@dataclass(frozen=True)
class Support:
    """One way of computing a tree."""

    backend: str
    """``"segments"``, ``"flex"``, ``"dense"`` (all in tree_mask.py), or ``"paths"``: one row per root-to-leaf path."""
    attention: str = ""
    """transformers' name of the attention that takes the backend's mask."""
    windows: Mapping[str, int | None] | None = None
    """Layer type -> sliding window in tokens, None where there is none; None where attention cannot be a tree."""
    head: bool = False
    """Whether the LM head is computed in chunks; else the model's own forward pass does it, at the wanted rows."""
    pieces: bool = False
    """Whether a tree can be computed a piece at a time."""


PATHS = Support("paths")
Compute = Callable[[TokenTree, Support, int | None], Tensor]
"""(tree, how, tokens of a piece, None for one piece) -> logprobs (targets,) without gradient."""
_known: WeakKeyDictionary[PreTrainedModel, dict[str | None, Support]] = WeakKeyDictionary()


def support(base: PreTrainedModel, backend: str | None, compute: Compute) -> Support:
    """Return the fastest way in which ``base`` computes what it computes row by row, or ``backend``'s.

    Raises ConfigError where ``backend`` is given and the model does not compute the same with it.
    """
    known = _known.setdefault(base, {})
    if backend not in known:
        known[backend] = PATHS if backend == "paths" else _find(base, backend, compute)
    return known[backend]


def compute_paths(base: PreTrainedModel) -> None:
    """From now on compute one row per root-to-leaf path of ``base``: whoever loaded it knows that a tree goes wrong."""
    _known[base] = {None: PATHS}


@contextmanager
def attention_of(base: PreTrainedModel, name: str) -> Iterator[None]:
    """Let ``base`` attend by the implementation ``name``."""
    before = base.config._attn_implementation
    base.config._attn_implementation = name
    try:
        yield
    finally:
        # Checkpointed layers attend once more in the backward pass.
        if not (base.is_gradient_checkpointing and base.training):
            base.config._attn_implementation = before


def _find(base: PreTrainedModel, backend: str | None, compute: Compute) -> Support:
    windows = attention_windows(base)
    reason = "its layers carry state along the row, or it takes no positions"
    if windows is not None:
        with _evaluating(base):
            tree = probe_tree(base.config.get_text_config().vocab_size)
            with attention_of(base, "eager"):  # the definition: kernels leave out what they cannot do
                expected = compute(tree, PATHS, None)
            for candidate in _candidates(base, windows, backend):
                reason = _differs(compute, tree, candidate, expected, base.dtype)
                if reason is None:
                    pieces = (
                        candidate.head and _differs(compute, tree, candidate, expected, base.dtype, PROBE_PIECE) is None
                    )
                    return replace(candidate, pieces=pieces)
    if backend:
        raise ConfigError(f"{type(base).__name__} cannot compute a token tree with backend={backend!r}: {reason}")
    logger.warning(
        "the attention of %s cannot follow a token tree (%s); every root-to-leaf path is computed on its own",
        type(base).__name__,
        reason,
    )
    return PATHS


def _candidates(base: PreTrainedModel, windows: Mapping[str, int | None], backend: str | None) -> Iterator[Support]:
    attentions = {"segments": [ATTENTION], "flex": ["flex_attention"], "dense": ["sdpa", "eager"]}
    fastest = {"cpu": "segments", "cuda": "flex"}.get(base.device.type, "dense")
    for name in [backend] if backend else dict.fromkeys([fastest, "dense"]):
        if name not in attentions:
            raise ConfigError(f"backend={name!r} is unknown; there are: {', '.join([*attentions, 'paths'])}")
        for attention in attentions[name]:
            heads = (True, False) if head_of(base) else (False,)
            yield from (Support(name, attention, windows, head) for head in heads)


def _differs(
    compute: Compute, tree: TokenTree, how: Support, expected: Tensor, dtype: torch.dtype, piece: int | None = None
) -> str | None:
    """Return why ``how`` cannot be used, or None."""
    try:
        got = compute(tree, how, piece)
    except Exception as error:  # noqa: BLE001 - a foreign model may fail in any way here, and the next way may do
        return f"{type(error).__name__}: {error}"
    tolerance = TOLERANCE[dtype.itemsize] * max(1.0, float(expected.abs().max()))
    gap = float((got - expected).abs().max())
    return None if gap <= tolerance else f"its logprobs differ by {gap:.3g} from those of its rows"


def probe_tree(vocabulary: int) -> TokenTree:
    """Return a small tree with a turn that extends another, a fork, and two roots."""
    ids = [(7 * place + 3) % vocabulary for place in range(32)]
    calls = [(ids[:6], ids[6:9]), (ids[:12], ids[12:15]), (ids[:7], ids[20:24]), (ids[24:28], ids[28:32])]
    made = tuple(Call(tuple(prompt), tuple(sampled), (0.0,) * len(sampled)) for prompt, sampled in calls)
    return build_tree([Trajectory(task=None, calls=made)])


def attention_windows(base: PreTrainedModel) -> dict[str, int | None] | None:
    """Return layer type -> sliding window in tokens (None: unlimited), or None where attention cannot be a tree."""
    config = base.config.get_text_config()
    takes = inspect.signature(base.forward).parameters
    if base._is_stateful or "position_ids" not in takes or getattr(config, "alibi", False):
        return None
    window = getattr(config, "sliding_window", None)
    # The key alone says little: converted checkpoints carry it into architectures that do not declare and do not use it.
    alone = "sliding_attention" if window and hasattr(type(config), "sliding_window") else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or [alone])
    if kinds - {"full_attention", "sliding_attention"} or ("sliding_attention" in kinds and not window):
        return None
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


@contextmanager
def _evaluating(base: PreTrainedModel) -> Iterator[None]:
    """Switch dropout off and gradients too."""
    training = [module for module in base.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
