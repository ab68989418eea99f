"""Which prefixes decoding rows share, and that their attention is that of rows on their own."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from art_embedded import TINY
from art_embedded.kv import Batch, PackedKeyValues
from art_embedded.loading import load_model, make_key_values
from art_embedded.shared_prefixes import Shared, find_shared


def stored(rows):
    """The history and lengths of rows with these tokens."""
    history = np.zeros((len(rows), 400), np.int32)
    for row, tokens in enumerate(rows):
        history[row, : len(tokens)] = tokens
    return history, np.array([len(tokens) for tokens in rows])


def divisions(rows):
    """Every way to divide rows into groups."""
    if not rows:
        yield []
        return
    for count in range(len(rows)):
        for others in itertools.combinations(rows[1:], count):
            rest = [row for row in rows[1:] if row not in others]
            yield from ([(rows[0], *others), *division] for division in divisions(rest))


def saving(rows, group):
    """The tokens that a group needn't read again; less than 0 if its prefix is too short to be shared."""
    common = next(
        (at for at, tokens in enumerate(zip(*(rows[row] for row in group), strict=False)) if len(set(tokens)) > 1), None
    )
    length = min(len(rows[row]) for row in group) if common is None else common
    return (len(group) - 1) * length if len(group) == 1 or length >= 128 else -1


NESTED = [[(0, 180)], [(0, 128), (1, 60)], *[[(0, 133), (1, 60)]] * 3]
"""The last three save most as a group of their own, and the first two are not neighbours."""


@example(NESTED)
@given(st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(60, 130)), max_size=3), min_size=1, max_size=5))
def test_the_groups_are_disjoint_truly_common_and_save_the_most(stretches):
    rows = [[token for token, count in parts for _ in range(count)] for parts in stretches]
    found = find_shared(*stored(rows))
    members = [row for group in found for row in group.rows]
    assert len(members) == len(set(members))
    for group in found:
        assert len(group.rows) > 1 and group.length >= 128
        assert len({tuple(rows[row][: group.length]) for row in group.rows}) == 1
        assert all(len(rows[row]) >= group.length for row in group.rows)
    best = max(
        sum(savings)
        for division in divisions(list(range(len(rows))))
        if min(savings := [saving(rows, group) for group in division]) >= 0
    )
    assert sum((len(group.rows) - 1) * group.length for group in found) == best


def test_without_rows_nothing_is_shared():
    assert find_shared(*stored([])) == []


def latent():
    """A model whose attention has smaller values than keys, as DeepSeek's."""
    config = DeepseekV3Config(
        vocab_size=1000, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=4,
        n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1, moe_intermediate_size=8, n_shared_experts=1,
        first_k_dense_replace=1, max_position_embeddings=512, initializer_range=0.3, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return DeepseekV3ForCausalLM(config).eval()


@pytest.fixture(scope="module", params=[lambda: load_model(str(TINY)), latent], ids=["tiny", "latent"])
def model(request):
    return request.param()


@pytest.mark.parametrize("rests", [(1, 2, 3, 4), (40, 1, 60, 7), (200, 3, 3, 3)], ids=str)
@torch.inference_mode()
def test_rows_that_share_a_prefix_get_the_logits_of_rows_on_their_own(model, rests):
    draw = np.random.default_rng(0)
    prefixes = [draw.integers(5, 800, length).tolist() for length in (150, 180)]
    # Groups are mixed, and rows 0 and 5 are in none.
    rows = [draw.integers(5, 800, 90).tolist()]
    rows += [prefixes[number % 2] + draw.integers(5, 800, rest).tolist() for number, rest in enumerate(rests)]
    rows += [draw.integers(5, 800, 130).tolist()]
    cache = make_key_values(model)
    assert isinstance(cache, PackedKeyValues)
    cache.resize(len(rows), 512)
    for row, tokens in enumerate(rows):
        count = len(tokens)
        cache.forward(Batch(tokens, list(range(count)), [row] * count, runs=[(0, count)], outputs=[count - 1]))
    shared = find_shared(*stored(rows))
    assert shared == [Shared((1, 3), 150), Shared((2, 4), 180)] or shared == [Shared((2, 4), 180), Shared((1, 3), 150)]
    count = len(rows)
    decoding = {"positions": [len(tokens) for tokens in rows], "decoding": count, "outputs": list(range(count))}
    alone, together = (
        cache.forward(Batch([7] * count, rows=list(range(count)), shared=groups, **decoding)) for groups in ([], shared)
    )
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-5 * float(alone.abs().max()))
