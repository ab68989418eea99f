"""Token trees for hybrid models: layers that carry a state along the row fork it where calls branch.

Layers of attention see their ancestors by a mask. Gated DeltaNet, Kimi's delta attention, Mamba and Mamba 2, and the short
convolutions of these and of LFM2 carry a state instead, so along a tree each segment must start from its parent's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from art_hybrid.states import ForkedStates


def forked_states(model: torch.nn.Module) -> type[ForkedStates] | None:
    """Return what plans the states of ``model`` along a tree, or None if no layer of it is known to carry one."""
    from art_hybrid.seams import follow_trees
    from art_hybrid.states import ForkedStates

    return ForkedStates if follow_trees(model) else None
