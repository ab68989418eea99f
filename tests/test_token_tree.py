"""build_tree: what is stored once, where the targets point, what is not trained."""

import numpy as np
import pytest
from hypothesis import given
from random_trees import make_call, path_to, trajectory_lists

from art_core.token_tree import build_tree, group_tree
from art_core.types import Call, Group, TokenTree, Trajectory


def all_calls(trajectories) -> list[Call]:
    return [call for trajectory in trajectories for call in trajectory.calls]


@given(trajectory_lists())
def test_the_path_to_a_target_is_exactly_the_tokens_of_its_call(trajectories):
    tree = build_tree(trajectories)
    target = 0
    for call in all_calls(trajectories):
        ids = call.prompt_ids + call.sampled_ids
        for position in range(len(call.sampled_ids)):
            end = len(call.prompt_ids) + position
            assert path_to(tree, tree.target_tokens[target]) == ids[: end + 1]
            assert path_to(tree, tree.target_contexts[target]) == ids[:end]
            assert tree.depths[tree.target_tokens[target]] == end
            target += 1
    assert target == tree.num_targets


@given(trajectory_lists())
def test_every_distinct_prefix_is_stored_once(trajectories):
    tree = build_tree(trajectories)
    ids = [call.prompt_ids + call.sampled_ids for call in all_calls(trajectories)]
    prefixes = {path[: length + 1] for path in ids for length in range(len(path))}
    assert tree.num_tokens == len(prefixes)
    assert {path_to(tree, index) for index in range(tree.num_tokens)} == prefixes


@given(trajectory_lists())
def test_targets_are_ordered_by_trajectory_call_and_position(trajectories):
    tree = build_tree(trajectories, [float(i + 1) for i in range(len(trajectories))])
    calls = [(number, call) for number, trajectory in enumerate(trajectories) for call in trajectory.calls]
    rows = [(n, c, i) for c, (n, call) in enumerate(calls) for i in range(len(call.sampled_ids))]
    assert tree.num_targets == len(rows)
    assert list(zip(tree.trajectory, tree.call, strict=True)) == [(n, c) for n, c, _ in rows]
    assert tree.old_logprobs.tolist() == [calls[c][1].logprobs[i] for _, c, i in rows]
    assert tree.advantages.tolist() == [n + 1 for n, _, _ in rows]
    untrained = [calls[c][1].finish_reason == "aborted" or i in calls[c][1].forced for _, c, i in rows]
    assert tree.weights.tolist() == [0.0 if skip else 1.0 for skip in untrained]


@given(trajectory_lists())
def test_nodes_are_in_depth_first_order(trajectories):
    tree = build_tree(trajectories)
    assert tree.node_starts[0] == 0 and tree.node_starts[-1] == tree.num_tokens
    assert (np.diff(tree.node_starts) > 0).all()
    path: list[int] = []
    for node, parent in enumerate(tree.node_parents):
        while path and path[-1] != parent:
            path.pop()
        assert parent == (path[-1] if path else -1)
        path.append(node)


@given(trajectory_lists())
def test_a_tree_of_the_same_calls_is_the_same_tree(trajectories):
    first, second = build_tree(trajectories), build_tree(list(trajectories))
    for name in TokenTree.__dataclass_fields__:
        assert np.array_equal(getattr(first, name), getattr(second, name)), name


def test_a_token_that_two_runs_sampled_is_one_token_and_two_targets():
    run = Trajectory(task="t", calls=(make_call([1, 2], [3, 4]),))
    tree = build_tree([run, run], [1.0, -1.0])
    assert tree.num_tokens == 4
    assert tree.target_tokens.tolist() == [2, 3, 2, 3]
    assert tree.target_contexts.tolist() == [1, 2, 1, 2]
    assert tree.advantages.tolist() == [1, 1, -1, -1]


def test_a_sampled_token_in_a_later_prompt_is_not_a_target_again():
    first, second = make_call([1, 2], [3]), make_call([1, 2, 3, 9], [4])
    tree = build_tree([Trajectory(task="t", calls=(first, second))])
    assert tree.num_tokens == 5
    assert tree.tokens[tree.target_tokens].tolist() == [3, 4]


def test_runs_without_a_common_start_have_roots_of_their_own():
    runs = [Trajectory(task="t", calls=(make_call([start, 5], [6]),)) for start in (1, 2)]
    tree = build_tree(runs)
    assert tree.node_parents.tolist() == [-1, -1]
    assert tree.depths.tolist() == [0, 1, 2, 0, 1, 2]


def test_no_calls_make_an_empty_tree():
    tree = build_tree([Trajectory(task="t", calls=())])
    assert (tree.num_tokens, tree.num_targets) == (0, 0)
    assert tree.node_starts.tolist() == [0]


def test_a_greedy_call_counts_as_temperature_one():
    calls = (make_call([1], [2], temperature=0.0), make_call([1], [3], temperature=0.7))
    tree = build_tree([Trajectory(task="t", calls=calls)])
    assert tree.temperatures.tolist() == pytest.approx([1.0, 0.7])


@pytest.mark.parametrize("own", [(), [(1.0,)]], ids=["of runs", "of calls"])
def test_array_types_are_those_that_the_contract_names(own):
    tree = build_tree([Trajectory(task="t", calls=(make_call([1], [2]),))], call_advantages=own)
    floats = {"old_logprobs", "temperatures", "weights", "advantages"}
    for name in TokenTree.__dataclass_fields__:
        assert getattr(tree, name).dtype == (np.float32 if name in floats else np.int64), name


@pytest.mark.parametrize("given", [(), [], np.empty(0)])
def test_without_advantages_every_target_has_zero(given):
    tree = build_tree([Trajectory(task="t", calls=(make_call([1], [2, 3]),))], given)
    assert tree.advantages.tolist() == [0, 0]


def test_advantages_must_be_one_per_trajectory():
    with pytest.raises(ValueError, match="3 advantages for 1 trajectories"):
        build_tree([Trajectory(task="t", calls=())], [1.0, 2.0, 3.0])


def test_a_calls_own_advantage_replaces_its_trajectorys():
    runs = [
        Trajectory(task="t", calls=(make_call([1], [2, 3]), make_call([1, 2, 3, 4], [5]))),
        Trajectory(task="t", calls=()),
        Trajectory(task="t", calls=(make_call([1], [6]),)),
    ]
    tree = group_tree(Group("t", tuple(runs), (1.0, 2.0, 3.0), ((0.5, 1.0), (), (3.0,))))
    assert tree.advantages.tolist() == [0.5, 0.5, 1.0, 3.0]
    assert group_tree(Group("t", tuple(runs), (1.0, 2.0, 3.0))).advantages.tolist() == [1.0, 1.0, 1.0, 3.0]


def test_call_advantages_must_be_one_per_call():
    run = Trajectory(task="t", calls=(make_call([1], [2]),))
    with pytest.raises(ValueError, match=r"for \[2\] calls of trajectories with \[1\] calls"):
        build_tree([run], [1.0], call_advantages=[(1.0, 2.0)])


def test_calls_cut_off_at_their_token_limit_are_trained_unless_they_are_dropped():
    sampled = {"length": [2, 3], "stop": [4], "aborted": [5]}
    calls = tuple(make_call([1], ids, finish_reason=reason) for reason, ids in sampled.items())
    group = Group("t", (Trajectory(task="t", calls=calls),))
    for build, runs in ((build_tree, group.trajectories), (group_tree, group)):
        assert build(runs).weights.tolist() == [1.0, 1.0, 1.0, 0.0]
        dropped = build(runs, drop_overlong=True)
        assert dropped.weights.tolist() == [0.0, 0.0, 1.0, 0.0]
        assert dropped.num_targets == 4
