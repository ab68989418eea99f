"""The functions through which a layer of transformers reads what came before a token, made to follow a tree.

Every family has them by these names in its own module. A call for a Piece is computed along the tree; all others pass through.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from art_hybrid.plan import Piece
from art_hybrid.scans import delta_rule, mamba2

Function = Callable[..., Any]
Function = Callable[..., Any]


def follow_trees(model: torch.nn.Module) -> bool:
    """Let the layers of ``model`` that carry a state follow a tree, and return whether it has any."""
    names = {type(module).__module__ for module in model.modules()}
    return any([_wrap(sys.modules[name]) for name in names])  # a list, so that all are wrapped


def _wrap(module: ModuleType) -> bool:
    seams = [name for name in SEAMS if hasattr(module, name)]
    for name in seams:
        function = getattr(module, name)
        if not hasattr(function, "along_rows"):
            setattr(module, name, _dispatching(function, SEAMS[name]))
    return bool(seams)


def _dispatching(original: Function, along_tree: Function) -> Function:
    @functools.wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        piece = kwargs.get("seq_idx")
        if not isinstance(piece, Piece):
            return original(*args, **kwargs)
        del kwargs["seq_idx"]
        return along_tree(piece, original, *args, **kwargs)

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


def _mamba2(piece: Piece, original: Function, *args: Any, return_final_states: bool = False, **kwargs: Any) -> Any:
    out, states = mamba2(piece, *args, **kwargs)
    return (out, states) if return_final_states else out


def _not_fused(piece: Piece, original: Function, *args: Any, **kwargs: Any) -> None:
    """Return None, as if there were no kernel for the whole layer; it then calls the other functions."""


SEAMS: dict[str, Function] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": _not_fused,
}
