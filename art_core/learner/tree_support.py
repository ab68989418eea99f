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
"""By the bytes of a number: logprobs that differ by less on average are equal. Models compute norms and softmax in float32
even where their weights are float64."""
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
    trims: bool = False
    """Whether the last layer can leave out the rows that predict no target."""
    positions: int | None = None
    """Rotary frequencies depend on the row's length beyond this many positions, so longer trees go path by path."""

    @property
    def packs(self) -> bool:
        """Whether several trees cost no more together than apart: not with a dense mask, nor where each path is a row."""
        return self.backend in ("segments", "flex")


PATHS = Support("paths")
Compute = Callable[[TokenTree, Support, int | None], Tensor]
"""(tree, how, tokens of a piece, None for one piece) -> logprobs (targets,) without gradient."""
_known: WeakKeyDictionary[PreTrainedModel, dict[tuple, Support]] = WeakKeyDictionary()
"""By what the answer depends on: the backend that was asked for, and what may be changed about a loaded model."""


def support(base: PreTrainedModel, backend: str | None, compute: Compute) -> Support:
    """Return the fastest way in which ``base`` computes what it computes row by row, or ``backend``'s.

    Raises ConfigError where ``backend`` is given and the model does not compute the same with it.
    """
    known = _known.setdefault(base, {})
    key = (backend, base.device.type, base.dtype, bool(head_of(base)))
    if key not in known:
        known[key] = _find(base, backend, compute)
    return known[key]


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
    with _without_dropout(base):
        tree = probe_tree(base.config.get_text_config().vocab_size)
        _check_causal(base, compute)
        if windows is not None and backend != "paths":
            with attention_of(base, "eager"):  # the definition: kernels leave out what they cannot do
                expected = compute(tree, PATHS, None)
            for candidate in _candidates(base, windows, backend):
                reason = _differs(compute, tree, candidate, expected, base.dtype)
                if reason is None:
                    return replace(
                        _with_extras(compute, tree, candidate, expected, base.dtype), positions=_positions(base)
                    )
                logger.info("%s: %s with %s is not used: %s", type(base).__name__, candidate.backend, candidate, reason)
        if backend not in (None, "paths"):
            raise ConfigError(f"{type(base).__name__} cannot compute a token tree with backend={backend!r}: {reason}")
        if backend is None:
            logger.warning(
                "the attention of %s cannot follow a token tree (%s); every root-to-leaf path is computed on its own",
                type(base).__name__,
                reason,
            )
        if not head_of(base):
            return PATHS
        chunked = replace(PATHS, head=True)
        return PATHS if _differs(compute, tree, chunked, compute(tree, PATHS, None), base.dtype) else chunked


def _candidates(base: PreTrainedModel, windows: Mapping[str, int | None], backend: str | None) -> Iterator[Support]:
    attentions = {"segments": [ATTENTION], "flex": ["flex_attention"], "dense": ["sdpa", "eager"]}
    fastest = {"cpu": "segments", "cuda": "flex"}.get(base.device.type, "dense")
    if getattr(base.config.get_text_config(), "attn_logit_softcapping", None):
        attentions["dense"].remove("sdpa")  # it leaves the cap out, which a small tree need not show
    for name in [backend] if backend else dict.fromkeys([fastest, "dense"]):
        if name not in attentions:
            raise ConfigError(f"backend={name!r} is unknown; there are: {', '.join([*attentions, 'paths'])}")
        for attention in attentions[name]:
            heads = (True, False) if head_of(base) else (False,)
            yield from (Support(name, attention, windows, head) for head in heads)


def _with_extras(compute: Compute, tree: TokenTree, how: Support, expected: Tensor, dtype: torch.dtype) -> Support:
    """Return ``how`` with what of ``pieces`` and ``trims`` changes nothing."""
    if not how.head:
        return how
    how = replace(how, pieces=_differs(compute, tree, how, expected, dtype, PROBE_PIECE) is None)
    if how.backend != "segments":
        return how
    trimmed = replace(how, trims=True)
    sizes = (None, PROBE_PIECE) if how.pieces else (None,)
    return how if any(_differs(compute, tree, trimmed, expected, dtype, size) for size in sizes) else trimmed


def _differs(
    compute: Compute, tree: TokenTree, how: Support, expected: Tensor, dtype: torch.dtype, piece: int | None = None
) -> str | None:
    """Return why ``how`` cannot be used, or None."""
    try:
        got = compute(tree, how, piece)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a foreign model may fail in any way here, and the next way may do
        return f"{type(error).__name__}: {error}"
    gap = _gap(got, expected, dtype)
    return None if gap is None else f"its logprobs differ by {gap:.3g} on average from those of its rows"


def _check_causal(base: PreTrainedModel, compute: Compute) -> None:
    """Raise ConfigError where what follows a token changes its logprob: such a model cannot have sampled it."""
    call, longer = probe_calls(base.config.get_text_config().vocab_size)[:2]
    alone = compute(build_tree([Trajectory(task=None, calls=(call,))]), PATHS, None)
    first = compute(build_tree([Trajectory(task=None, calls=(call, longer))]), PATHS, None)[: len(alone)]
    if _gap(first, alone, base.dtype) is not None:
        raise ConfigError(
            f"{type(base).__name__} is not causal as it is configured: tokens that follow change a token's logprob, so it "
            "cannot be a policy; give a causal language model (some need is_decoder=True in their config.json)"
        )


def _gap(got: Tensor, expected: Tensor, dtype: torch.dtype) -> float | None:
    """Return by how much logprobs differ on average; None where that is rounding."""
    gap = float((got - expected).abs().mean())
    return None if gap <= TOLERANCE[dtype.itemsize] * max(1.0, float(expected.abs().mean())) else gap


def probe_calls(vocabulary: int) -> tuple[Call, ...]:
    """Return a call, a turn that extends it, a fork, and a call with another beginning."""
    ids = [(7 * place + 3) % vocabulary for place in range(32)]
    calls = [(ids[:6], ids[6:9]), (ids[:12], ids[12:15]), (ids[:7], ids[20:24]), (ids[24:28], ids[28:32])]
    return tuple(Call(tuple(prompt), tuple(sampled), (0.0,) * len(sampled)) for prompt, sampled in calls)


def probe_tree(vocabulary: int) -> TokenTree:
    """Return the tree of ``probe_calls``."""
    return build_tree([Trajectory(task=None, calls=probe_calls(vocabulary))])


def attention_windows(base: PreTrainedModel) -> dict[str, int | None] | None:
    """Return layer type -> sliding window in tokens (None: unlimited), or None where attention cannot be a tree."""
    config = base.config.get_text_config()
    takes = inspect.signature(base.forward).parameters
    if base._is_stateful or "position_ids" not in takes or getattr(config, "alibi", False):
        return None
    if getattr(config, "keep_window_size", None) or getattr(config, "attention_layers", None):
        return None  # Doge keeps the top scores of a whole row; GPT-Neo's windows count places in the row
    window = getattr(config, "sliding_window", None)
    # The key alone says little: converted checkpoints carry it into architectures that do not declare and do not use it.
    alone = "sliding_attention" if window and hasattr(type(config), "sliding_window") else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or [alone])
    if kinds - {"full_attention", "sliding_attention"} or ("sliding_attention" in kinds and not window):
        return None
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def _positions(base: PreTrainedModel) -> int | None:
    """Return how long a row may be before its length changes the rotary frequencies of all its positions."""
    config = base.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(it for it in rope.values() if isinstance(it, dict))]
    limits = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    limits += [config.max_position_embeddings for kind in kinds if kind.get("rope_type") == "dynamic"]
    return min(limits, default=None)


@contextmanager
def _without_dropout(base: PreTrainedModel) -> Iterator[None]:
    """Compute without gradients and, where the model has dropout, in evaluation mode; else in the mode that it is in."""
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
