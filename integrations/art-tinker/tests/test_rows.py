"""Token trees as rows: every trained target is computed once, after exactly the tokens of its call."""

import numpy as np
import pytest
from hypothesis import given
from random_trees import path_to, trajectory_lists

from art_core.token_tree import build_tree
from art_core.types import Call, Trajectory
from art_tinker.rows import rows_of


@given(trajectory_lists())
def test_every_trained_target_is_in_one_row_after_the_tokens_of_its_call(trajectories):
    tree = build_tree(trajectories)
    trained = np.flatnonzero(tree.weights)
    seen = []
    for row in rows_of(tree):
        for number, place in zip(row.targets, row.places, strict=True):
            seen.append(int(number))
            assert tuple(row.ids[: place + 2]) == path_to(tree, tree.target_tokens[trained[number]])
    assert sorted(seen) == list(range(len(trained)))


@given(trajectory_lists())
def test_a_row_ends_with_its_last_target(trajectories):
    assert all(row.places.max() == len(row.ids) - 2 for row in rows_of(build_tree(trajectories)))


def test_calls_that_sampled_the_same_token_share_its_logprob_and_add_up_their_derivatives():
    call = Call(prompt_ids=(1, 2), sampled_ids=(3,), logprobs=(-0.5,))
    longer = Call(prompt_ids=(1, 2), sampled_ids=(3, 4), logprobs=(-0.5, -1.0))
    [row] = rows_of(build_tree([Trajectory(task=None, calls=(each,)) for each in (call, longer)]))
    assert row.ids.tolist() == [1, 2, 3, 4]
    assert row.logprobs(np.array([-0.5, -0.5, -1.0])) == pytest.approx([0, -0.5, -1])
    assert row.sums(np.array([1.0, 2.0, 4.0])) == pytest.approx([0, 3, 4])
