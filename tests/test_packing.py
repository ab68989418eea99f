"""pack: trees become forests under a budget, and nothing is padded, lost or computed twice."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tree_cases import FORKED, make_call, make_model

from art_core.learner import tree_logprobs
from art_core.learner.gradients import join, pack
from art_core.token_tree import build_tree
from art_core.types import Trajectory

LINE = [Trajectory(task="u", calls=(make_call([5, 4], [3, 3]), make_call([5, 4, 3, 3, 7], [8])), reward=1.0)]
TREES = [
    build_tree(FORKED, [1.0, -1.0, 0.5]),
    build_tree(LINE, [2.0]),
    build_tree([]),
    build_tree(LINE * 2, [1.0, -1.0]),
]


def paths(tree):
    """Return every target's whole context and token."""
    node_of = np.repeat(np.arange(len(tree.node_parents)), np.diff(tree.node_starts))
    found = []
    for target in tree.target_tokens:
        node, ids = node_of[target], list(tree.tokens[tree.node_starts[node_of[target]] : target + 1])
        while (node := tree.node_parents[node]) >= 0:
            ids = list(tree.tokens[tree.node_starts[node] : tree.node_starts[node + 1]]) + ids
        found.append(tuple(ids))
    return found


def test_a_forest_holds_every_tree_s_targets_in_their_contexts():
    forest = join(TREES)
    assert paths(forest) == [path for tree in TREES for path in paths(tree)]
    assert forest.num_tokens == sum(tree.num_tokens for tree in TREES)
    assert forest.trajectory.tolist() == [0] * 5 + [1] * 6 + [2] + [3] * 3 + [4] * 3 + [5] * 3
    assert len(np.unique(forest.call)) == 5 + 2 + 4
    np.testing.assert_array_equal(forest.advantages, np.concatenate([tree.advantages for tree in TREES]))


def test_a_forest_has_the_logprobs_of_its_trees():
    model = make_model("qwen2 with a window in one layer")
    forest, trees = join(TREES), [tree_logprobs(model, tree) for tree in TREES]
    torch.testing.assert_close(tree_logprobs(model, forest), torch.cat([each.double() for each in trees]))


@given(sizes=st.lists(st.integers(1, 40), max_size=12), budget=st.integers(1, 60))
def test_forests_keep_to_the_budget_and_lose_nothing(sizes, budget):
    trees = [build_tree([Trajectory(task="t", calls=(make_call([4] * size, [5]),))]) for size in sizes]
    forests = pack(trees, budget)
    assert sum(forest.num_tokens for forest in forests) == sum(tree.num_tokens for tree in trees)
    assert sum(forest.num_targets for forest in forests) == len(trees)
    for forest in forests:
        assert forest.num_tokens <= budget or np.count_nonzero(forest.node_parents < 0) == 1


@pytest.mark.parametrize("budget", [4, 15, 10_000])
def test_what_fits_together_is_one_pass(budget):
    trees = [tree for tree in TREES if tree.num_tokens]
    assert len(pack(trees, budget)) == {4: 3, 15: 2, 10_000: 1}[budget], [tree.num_tokens for tree in trees]
