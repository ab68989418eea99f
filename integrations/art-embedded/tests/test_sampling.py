"""Which tokens are sampled, and how often, against transformers."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TopKLogitsWarper, TopPLogitsWarper

from art_embedded.sampling import Draw, sample

ROWS = 1000


class Fixed(random.Random):
    """A source of one number."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def random(self) -> float:
        return self.number


def shares(logits: torch.Tensor, **settings) -> torch.Tensor:
    """Return how often each token is sampled if all random numbers are equally frequent."""
    draws = [Draw(**settings, random=Fixed((row + 0.5) / ROWS)) for row in range(ROWS)]
    tokens = [sampled.token for sampled in sample(logits.expand(ROWS, -1), draws)]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / ROWS


@given(
    seed=st.integers(0, 2**31),
    top_p=st.floats(0.01, 0.99) | st.just(1.0),
    top_k=st.integers(0, 12),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
)
def test_top_k_and_top_p_leave_what_they_leave_in_transformers(seed, top_p, top_k, temperature):
    logits = 2 * torch.randn(10, generator=torch.Generator().manual_seed(seed))
    scores = logits[None] / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1.0:
        scores = TopPLogitsWarper(top_p)(None, scores)
    expected = scores.softmax(-1)[0]
    found = shares(logits, top_p=top_p, top_k=top_k, temperature=temperature)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=2 / ROWS)
    assert not found[expected == 0].any()
