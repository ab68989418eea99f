"""Token ids -> the logprobs that the served model gives them. Knows nothing about requests, or about what is stored for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from art_embedded.kv import Batch, KeyValues

MOST_SCORED = 4096
"""Tokens of a text."""
PIECE = 512
"""Tokens whose logits are there at a time."""


def score(key_values: KeyValues, ids: Sequence[int]) -> list[float]:
    """Return the logprob (nats, temperature 1) of every token but the first, given those before it: (len(ids) - 1,).

    Computed the way answers are, anew from the first token, and beside what ``key_values`` hold.
    """
    own = key_values.fresh()
    own.resize(1, len(ids))
    logprobs: list[float] = []
    for start in range(0, len(ids) - 1, PIECE):  # the last token predicts nothing that is asked for
        piece = list(ids[start : min(start + PIECE, len(ids) - 1)])
        places = range(len(piece))
        batch = Batch(
            ids=piece,
            positions=[start + place for place in places],
            rows=[0] * len(piece),
            runs=[(0, len(piece))],
            outputs=list(places),
        )
        logits = own.forward(batch)
        following = torch.tensor(ids[start + 1 : start + 1 + len(piece)], device=logits.device)
        logprobs += (logits.gather(1, following[:, None])[:, 0] - logits.logsumexp(-1)).tolist()
    return logprobs
