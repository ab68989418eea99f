"""The functions through which a layer of transformers reads what came before a token, made to follow a tree.

Every family has them by these names in its own module. A call for a Piece is computed along the tree; every other call reaches
the original. After a pass, hooks check that all layers with a state followed: a model may drop the piece on its way to them.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from art_hybrid.plan import Piece
from art_hybrid.scans import delta_rule, mamba1, mamba2

Function = Callable[..., Any]
STATE_TYPES = frozenset({"linear_attention", "conv", "hybrid"})
"""Kinds of layers, as configs name them, that carry a state."""
FUSED = "mamba2_split_conv1d_scan_combined"
MAMBA = "mamba_selective_scan"
OUT_OF_REACH = frozenset({"mamba", "falcon_mamba"})
"""Models that pass nothing on to their layers."""
_hooked: WeakSet[torch.nn.Module] = WeakSet()
_layer = threading.local()
"""``piece``: what the layer that this thread computes was passed as ``seq_idx``. Jamba's doesn't pass it on."""


def follow_trees(model: PreTrainedModel) -> bool:
    """Let the layers of ``model`` that carry a state follow a tree, and return whether it has any, and all can."""
    names = {type(module).__module__ for module in model.modules()}
    modules = [sys.modules[name] for name in names if name.startswith("transformers.models.")]
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    layers = sum(kind in STATE_TYPES for kind in kinds)
    if not layers or model.config.model_type in OUT_OF_REACH:
        return False
    wrapped = {name for module in modules for name in _wrap(module)}
    expected = dict.fromkeys(wrapped - {FUSED}, layers)
    for module in (model, model.get_decoder()):
        if wrapped and module not in _hooked:
            _hooked.add(module)
            module.register_forward_pre_hook(_begin, with_kwargs=True)
            module.register_forward_hook(functools.partial(_check, expected), with_kwargs=True)
    for layer in model.get_decoder().modules() if MAMBA in wrapped else ():
        if isinstance(layer, GradientCheckpointingLayer) and layer not in _hooked:
            _hooked.add(layer)
            layer.register_forward_pre_hook(_enter, with_kwargs=True)
            layer.register_forward_hook(_leave, always_call=True)
    return bool(wrapped)


def _enter(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _layer.piece = kwargs.get("seq_idx")


def _leave(*_: Any) -> None:
    _layer.piece = None


def _begin(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if isinstance(piece := kwargs.get("seq_idx"), Piece):
        piece.calls.clear()


def _check(
    expected: dict[str, int], model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    piece = kwargs.get("seq_idx")
    if isinstance(piece, Piece) and piece.calls != expected:
        raise RuntimeError(
            f"{type(model).__name__} doesn't pass seq_idx to all layers with a state: a tree needs {expected}, and there were "
            f"{dict(piece.calls)}"
        )


def _wrap(module: ModuleType) -> list[str]:
    """Wrap the functions that the module has, and return their names."""
    seams = [name for name in SEAMS if callable(getattr(module, name, None))]
    for name in seams:
        function = getattr(module, name)
        if not hasattr(function, "along_rows"):
            setattr(module, name, _dispatching(name, function))
    return seams


def _dispatching(name: str, original: Function) -> Function:
    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        piece = kwargs.get("seq_idx", getattr(_layer, "piece", None))
        if not isinstance(piece, Piece):
            return original(*args, **kwargs)
        kwargs.pop("seq_idx", None)
        if name != FUSED:
            piece.calls[name] += 1
        return SEAMS[name](piece, original, *args, **kwargs)

    dispatch.along_rows = original
    return dispatch


def _convolution(
    piece: Piece, original: Function, hidden_states: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """(1, channels, inputs of earlier pieces and own) -> (1, channels, own tokens)."""
    layout = piece.layout(weight.shape[-1])
    row = pad(hidden_states, (1, 0)).index_select(-1, layout.columns)
    return original(row, weight, *args, **kwargs).index_select(-1, layout.places)


def _delta_rule(piece: Piece, original: Function, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return delta_rule(piece, *args, **kwargs)


def _mamba(piece: Piece, original: Function, *args: Any, return_last_state: bool = False, **kwargs: Any) -> Any:
    out, states = mamba1(piece, *args, **kwargs)
    return (out, states) if return_last_state else out


def _mamba2(piece: Piece, original: Function, *args: Any, return_final_states: bool = False, **kwargs: Any) -> Any:
    out, states = mamba2(piece, *args, **kwargs)
    return (out, states) if return_final_states else out


def _not_fused(piece: Piece, original: Function, *args: Any, **kwargs: Any) -> None:
    """Return None, as if there were no kernel for the whole layer; it then calls the other functions."""


SEAMS: dict[str, Function] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    MAMBA: _mamba,
    "mamba2_chunk_scan": _mamba2,
    FUSED: _not_fused,
}
