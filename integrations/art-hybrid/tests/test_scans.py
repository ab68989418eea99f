"""The chunked recurrences along a tree equal the plain recurrence along every path, and so do their gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu, softplus
from tree_cases import make_call, trajectory_lists

from art_core.token_tree import build_tree
from art_core.types import Trajectory
from art_hybrid.plan import Piece, TreePlan
from art_hybrid.scans import delta_rule, mamba1, mamba2

HEADS, KEY, VALUE = 4, 3, 5


def inputs(tokens, **shapes):
    torch.manual_seed(0)
    return {
        name: torch.randn(1, tokens, *shape, dtype=torch.float64, requires_grad=True) for name, shape in shapes.items()
    }


def gates(tensors):
    """``g`` negative and ``beta`` between 0 and 1, as the layers compute them."""
    return tensors | {"g": -softplus(tensors["g"]), "beta": tensors["beta"].sigmoid()}


def delta_rule_token_by_token(before, query, key, value, g, beta):
    states, outputs = {-1: query.new_zeros(HEADS, KEY, VALUE)}, []
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query, key = (x.repeat_interleave(HEADS // x.shape[2], 2) for x in (query, key))
    for token, previous in enumerate(before):
        q, k, v, decay, write = (x[0, token] for x in (query, key, value, g, beta))
        state = states[previous] * decay.exp().reshape(HEADS, -1, 1)
        delta = write[:, None] * (v - (state * k[:, :, None]).sum(1))
        states[token] = state + k[:, :, None] * delta[:, None]
        outputs.append((states[token] * q[:, :, None]).sum(1) * KEY**-0.5)
    return torch.stack(outputs)[None]


def mamba2_token_by_token(before, x, dt, a, b, c, d):
    states, outputs = {-1: x.new_zeros(HEADS, KEY, VALUE)}, []
    for token, previous in enumerate(before):
        b_head, c_head = (t[0, token].repeat_interleave(2, 0) for t in (b, c))
        step = softplus(dt[0, token])[:, None, None]
        states[token] = (
            states[previous] * (a[:, None, None] * step).exp() + b_head[:, :, None] * x[0, token][:, None] * step
        )
        outputs.append((states[token] * c_head[:, :, None]).sum(1) + d[:, None] * x[0, token])
    return torch.stack(outputs)[None]


def mamba1_token_by_token(before, x, dt, z, b, c, a, d):
    states, outputs = {-1: x.new_zeros(HEADS, KEY)}, []
    for token, previous in enumerate(before):
        own, gate, step = x[0, token], z[0, token], softplus(dt[0, token] + 0.5)[:, None]
        states[token] = states[previous] * (a * step).exp() + step * b[0, token] * own[:, None]
        outputs.append(((states[token] * c[0, token]).sum(1) + d * own) * silu(gate))
    return torch.stack(outputs)[None]


def in_pieces(tree, plan, cut, compute):
    """Return the outputs of ``compute(piece, slice of tokens)`` for two pieces, the second with the states of the first."""
    outputs, states = [], None
    for start, stop in ((0, cut), (cut, tree.num_tokens)):
        if start < stop:
            piece = Piece(plan, start, stop, torch.device("cpu"))
            piece.states = states
            out, states = compute(piece, slice(start, stop))
            outputs.append(out)
    assert len(states) == 0
    return torch.cat(outputs, 1)


def check_equal(ours, theirs, tensors):
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=torch.float64).view(ours.shape)
    leaves = [*tensors.values()]
    ours, theirs = (torch.autograd.grad((out * weights).sum(), leaves) for out in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("decay", "key_heads"),
    [((HEADS,), HEADS), ((HEADS, KEY), HEADS), ((HEADS,), HEADS // 2)],
    ids=["a decay per head", "a decay per channel", "a key head for two heads"],
)
@settings(max_examples=20)
@given(trajectories=trajectory_lists(), cut=st.integers(0, 40))
def test_the_delta_rule_along_a_tree_equals_the_recurrence_along_every_path(decay, key_heads, trajectories, cut):
    tree = build_tree(trajectories)
    plan = TreePlan(tree)
    tensors = inputs(
        tree.num_tokens, query=(key_heads, KEY), key=(key_heads, KEY), value=(HEADS, VALUE), g=decay, beta=(HEADS,)
    )

    def compute(piece, tokens):
        own = {name: tensor[:, tokens] for name, tensor in gates(tensors).items()}
        return delta_rule(piece, **own, use_qk_l2norm_in_kernel=True)

    ours = in_pieces(tree, plan, cut % tree.num_tokens, compute)
    check_equal(ours, delta_rule_token_by_token(plan.before.tolist(), **gates(tensors)), tensors)


@settings(max_examples=20)
@given(trajectories=trajectory_lists(), cut=st.integers(0, 40))
def test_mamba_2_along_a_tree_equals_the_recurrence_along_every_path(trajectories, cut):
    tree = build_tree(trajectories)
    plan = TreePlan(tree)
    tensors = inputs(tree.num_tokens, x=(HEADS, VALUE), dt=(HEADS,), b=(2, KEY), c=(2, KEY))
    a, d = -torch.arange(1.0, HEADS + 1).double(), torch.linspace(-1, 1, HEADS).double()

    def compute(piece, tokens):
        x, dt, b, c = (tensor[:, tokens] for tensor in tensors.values())
        return mamba2(piece, x, dt, a, b, c, D=d, dt_softplus=True)

    ours = in_pieces(tree, plan, cut % tree.num_tokens, compute)
    check_equal(ours, mamba2_token_by_token(plan.before.tolist(), **tensors, a=a, d=d), tensors)


@settings(max_examples=20)
@given(trajectories=trajectory_lists(), cut=st.integers(0, 40))
def test_mamba_1_along_a_tree_equals_the_recurrence_along_every_path(trajectories, cut):
    tree = build_tree(trajectories)
    plan = TreePlan(tree)
    tensors = inputs(tree.num_tokens, x=(HEADS,), dt=(HEADS,), z=(HEADS,), b=(KEY,), c=(KEY,))
    a, d = -torch.arange(1.0, HEADS * KEY + 1).view(HEADS, KEY).double(), torch.linspace(-1, 1, HEADS).double()
    bias = torch.full((HEADS,), 0.5).double()

    def compute(piece, tokens):
        x, dt, z, b, c = (tensor[:, tokens].mT for tensor in tensors.values())
        out, states = mamba1(piece, x, dt, a, b, c, D=d, z=z, delta_bias=bias, delta_softplus=True)
        return out.mT, states

    ours = in_pieces(tree, plan, cut % tree.num_tokens, compute)
    check_equal(ours, mamba1_token_by_token(plan.before.tolist(), **tensors, a=a, d=d), tensors)


def test_strong_decay_over_a_long_segment_neither_overflows_nor_loses_digits():
    tokens = 100
    plan = TreePlan(build_tree([Trajectory(task="t", calls=(make_call([3] * 50, [3] * (tokens - 50)),))]))
    tensors = inputs(tokens, x=(HEADS, VALUE), dt=(HEADS,), b=(2, KEY), c=(2, KEY))
    a, d = -torch.tensor([1e-3, 1.0, 16.0, 1e3]).double(), torch.zeros(HEADS).double()
    expected = mamba2_token_by_token(plan.before.tolist(), **tensors, a=a, d=d)
    x, dt, b, c = (tensor.float() for tensor in tensors.values())
    out, _ = mamba2(Piece(plan, 0, tokens, torch.device("cpu")), x, dt, a.float(), b, c, D=d.float(), dt_softplus=True)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
