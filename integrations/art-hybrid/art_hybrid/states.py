"""The states of layers along a tree, and what a layer passes from one piece of it to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import LinearAttentionLayer

from art_core.learner.tree_forward import PieceLayer
from art_hybrid.plan import Piece, TreePlan
from art_hybrid.seams import STATE_TYPES


class ForkedStates(TreePlan):
    """Plans a tree for layers that carry a state: what the learner asks of the entry points ``art.layer_states``."""

    layer_types = STATE_TYPES | {"mlp", "moe"}
    """Kinds of layers, as configs name them, that carry a state or don't read what comes before a token."""

    def piece(self, start: int, stop: int, device: torch.device) -> CachedPiece:
        """Return the plan of tokens ``start`` to ``stop``, for the layers' argument ``seq_idx``."""
        return CachedPiece(self, start, stop, device)


class CachedPiece(Piece):
    """A piece whose layers read what earlier pieces passed on."""

    def layer(self, *passed_on: Sequence[Tensor]) -> StateLayer:
        """Return a layer's part of the cache; each of ``passed_on`` has one tensor per earlier piece."""
        return StateLayer(self, *passed_on)


class StateLayer(LinearAttentionLayer, PieceLayer):
    """A layer's part of the cache of one piece: keys and values, the inputs of its convolution, and its states.

    Of ``inputs`` and ``states`` only the last counts, because every piece passes on all that later ones need.
    """

    def __init__(
        self,
        piece: Piece,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        inputs: Sequence[Tensor],
        states: Sequence[Tensor],
    ) -> None:
        PieceLayer.__init__(self, keys, values)
        LinearAttentionLayer.__init__(self)
        self._piece = piece
        self._inputs, self._states = inputs[-1:], states[-1:]
        nothing = torch.empty(0, device=piece.device)
        self.own = nothing, nothing, nothing, nothing

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        passed_on = self.own[2:]
        keys, values = super().update(*args, **kwargs)
        self.own = *self.own, *passed_on
        return keys, values

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int = 0, **_: Any) -> Tensor:
        """(1, channels, own tokens) -> the same behind the inputs of earlier pieces."""
        inputs = torch.cat([*self._inputs, conv_states], dim=-1)
        passed_on = pad(inputs, (1, 0)).index_select(-1, self._piece.layout(conv_kernel_size).passed_on)
        self.own = *self.own[:2], passed_on, self.own[3]
        self._piece.states = self._states[0] if self._states else None  # the scan comes next
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: Any) -> Tensor:
        self.own = *self.own[:3], recurrent_states
        return recurrent_states
