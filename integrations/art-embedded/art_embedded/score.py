"""Computes the logprobs that the served model assigns to token ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from art_embedded.kv import Batch, KeyValues

MAX_SCORED = 4096
"""Most tokens that are scored at once."""
PIECE = 512
"""Tokens per forward pass, which limits the memory for logits."""


def score(key_values: KeyValues, ids: Sequence[int]) -> list[float]:
    """Return the logprob (nats, temperature 1) of every token except the first, given the tokens before it: (len(ids) - 1,).

    Computed like answers, but from the first token on, without using or changing what ``key_values`` hold.
    """
    scratch = key_values.fresh()
    scratch.resize(1, len(ids))
    logprobs: list[float] = []
    for start in range(0, len(ids) - 1, PIECE):  # nothing follows the last token
        piece = list(ids[start : min(start + PIECE, len(ids) - 1)])
        offsets = range(len(piece))
        batch = Batch(
            ids=piece,
            positions=[start + offset for offset in offsets],
            rows=[0] * len(piece),
            runs=[(0, len(piece))],
            outputs=list(offsets),
        )
        logits = scratch.forward(batch)
        following = torch.tensor(ids[start + 1 : start + 1 + len(piece)], device=logits.device)
        logprobs += (logits.gather(1, following[:, None])[:, 0] - logits.logsumexp(-1)).tolist()
    return logprobs
