"""Token trees for hybrid models: layers that carry a state along the row fork it where calls branch.

Layers of attention see their ancestors by a mask. Gated DeltaNet, Kimi's delta attention, Mamba 1 and 2, and the short
convolutions of these and of LFM2 carry a state instead, so along a tree each segment must start from its parent's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from art_hybrid.states import ForkedStates

SINCE = (5, 15)
"""The first version of transformers whose layers call their scans by the names in ``seams.py``."""


def forked_states(model: PreTrainedModel) -> type[ForkedStates] | None:
    """Return what plans the states of ``model`` along a tree, or None if it has none or one that can't follow it."""
    import transformers

    if tuple(map(int, transformers.__version__.split(".")[:2])) < SINCE:
        return None
    from art_hybrid.seams import follow_trees
    from art_hybrid.states import ForkedStates

    return ForkedStates if follow_trees(model) else None
