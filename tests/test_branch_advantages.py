"""``advantage="branch"``: a call is compared with what the rollouts got that made it from the same context."""

from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from art_core.scoring import advantages, has_contrast
from art_core.token_tree import build_tree
from art_core.types import Call, Group, Trajectory

ROOT = (1, 2)
"""The context of every rollout's first call."""


def call_at(context, sampled=(9,), agent=None):
    return Call(prompt_ids=tuple(context), sampled_ids=tuple(sampled), logprobs=(-1.0,) * len(sampled), agent=agent)


def group_of(*rollouts):
    """Return a group of (reward, calls)."""
    return Group("t", tuple(Trajectory(task="t", calls=tuple(calls), reward=reward) for reward, calls in rollouts))


def of_calls(group):
    """Return the calls' advantages in units of reward, as ``mean`` has them."""
    rewards = [t.reward for t in group.trajectories if t.reward is not None]
    unit = float(np.std(rewards, ddof=1)) + 1e-4
    return [[it * unit for it in found] for found in advantages(group, "branch").call_advantages]


def test_at_a_branch_a_rollout_is_compared_with_those_that_came_there_too():
    # Two searched well and came to the same place, where one of them failed; two searched badly, and apart.
    good, bad, worse = (*ROOT, 3), (*ROOT, 4), (*ROOT, 5)
    group = group_of(
        (1.0, [call_at(ROOT, (3,)), call_at(good, (6,))]),
        (0.0, [call_at(ROOT, (3,)), call_at(good, (7,))]),
        (0.0, [call_at(ROOT, (4,)), call_at(bad)]),
        (0.0, [call_at(ROOT, (5,)), call_at(worse)]),
    )
    found = of_calls(group)
    assert [first for first, _ in found] == pytest.approx([0.75, -0.25, -0.25, -0.25]), "all share the first context"
    # At the second context the expected reward of the first is (the other's 0 + the three others' mean 0) / 2.
    assert found[0][1] == pytest.approx((1 - 0) * 3 / 4)
    # And of the second: (the other's 1 + the three others' mean 1/3) / 2 = 2/3.
    assert found[1][1] == pytest.approx((0 - 2 / 3) * 3 / 4)
    assert [found[2][1], found[3][1]] == pytest.approx([-0.25, -0.25]), "nobody else was there"


def test_the_tree_trains_each_call_with_the_advantage_of_its_branch():
    good, bad = (*ROOT, 3), (*ROOT, 4)
    group = advantages(
        group_of(
            (1.0, [call_at(ROOT, (3,)), call_at(good, (6,))]),
            (0.0, [call_at(ROOT, (3,)), call_at(good, (7,))]),
            (0.0, [call_at(ROOT, (4,)), call_at(bad, (8,))]),
        ),
        "branch",
    )
    tree = build_tree(group.trajectories, call_advantages=group.call_advantages)
    targets = zip(tree.trajectory.tolist(), tree.tokens[tree.target_tokens].tolist(), strict=True)
    trained = dict(zip(targets, tree.advantages.tolist(), strict=True))
    by_hand = {
        (place, call.sampled_ids[0]): advantage
        for place, (t, found) in enumerate(zip(group.trajectories, group.call_advantages, strict=True))
        for call, advantage in zip(t.calls, found, strict=True)
    }
    assert trained == pytest.approx(by_hand) and len(by_hand) == 6
    assert tree.num_tokens == len(ROOT) + len({3, 4}) + len({6, 7, 8}), "what they share is computed once"


rewards = st.floats(-5, 5).map(lambda it: round(it, 3))
paths = st.lists(st.integers(1, 3), min_size=1, max_size=4)
"""What a rollout samples call by call, each one token. It is the next context's end."""


def walked(path):
    return [call_at((*ROOT, *path[:depth]), (token,)) for depth, token in enumerate(path)]


@given(st.lists(st.tuples(rewards, paths), min_size=2, max_size=8))
def test_while_all_share_a_context_it_is_the_advantage_of_the_rollout(rollouts):
    group = advantages(group_of(*((reward, walked(path)) for reward, path in rollouts)), "branch")
    assert group.advantages == advantages(replace(group, advantages=(), call_advantages=())).advantages
    assert [first for first, *_ in group.call_advantages] == pytest.approx(list(group.advantages), abs=1e-6)


@given(st.lists(st.tuples(rewards, paths), min_size=2, max_size=8), st.data())
def test_the_expected_reward_does_not_depend_on_what_the_rollout_got_or_did_next(rollouts, data):
    """So it is a baseline: it takes no part of the gradient away, only variance."""
    place = data.draw(st.integers(0, len(rollouts) - 1))
    depth = data.draw(st.integers(0, len(rollouts[place][1]) - 1))
    _, path = rollouts[place]
    other = [*rollouts]
    other[place] = (data.draw(rewards), path[:depth] + data.draw(paths))
    expected = []
    for each in (rollouts, other):
        assume(
            max(it for it, _ in each) - min(it for it, _ in each) >= 0.01
        )  # without contrast there is nothing to compare
        found = of_calls(group_of(*((reward, walked(path)) for reward, path in each)))
        expected.append(each[place][0] - found[place][depth] * len(each) / (len(each) - 1))
    assert expected[0] == pytest.approx(expected[1], abs=1e-6)


@given(st.lists(st.tuples(rewards, paths), min_size=2, max_size=6), st.randoms())
def test_the_order_of_the_rollouts_does_not_matter(rollouts, random):
    order = list(range(len(rollouts)))
    random.shuffle(order)
    group = group_of(*((reward, walked(path)) for reward, path in rollouts))
    shuffled = replace(group, trajectories=tuple(group.trajectories[it] for it in order))
    found, again = (advantages(it, "branch").call_advantages for it in (group, shuffled))
    for place, it in enumerate(order):
        assert again[place] == pytest.approx(found[it], abs=1e-9)


def test_what_comes_after_a_certain_success_is_not_credited_with_it():
    """Where all that came to a context succeeded, the step into it is what was good, and little is left for the steps after."""
    sure = (*ROOT, 3)
    good = [(1.0, [call_at(ROOT, (3,)), call_at(sure, (it,))]) for it in range(20, 24)]
    bad = [(0.0, [call_at(ROOT, (4,)), call_at((*ROOT, 4), (it,))]) for it in range(30, 34)]
    found = of_calls(group_of(*good, *bad))
    assert fmean(first for first, _ in found[:4]) == pytest.approx(0.5)
    assert 0 < fmean(second for _, second in found[:4]) < 0.5 / 3


def test_contexts_of_two_agents_are_apart_also_if_their_tokens_are_the_same():
    later = (*ROOT, 3)
    rollouts = [(float(it == 0), [call_at(ROOT), call_at(later, agent="ab"[it % 2])]) for it in range(4)]
    same = [(float(it == 0), [call_at(ROOT), call_at(later, agent="a")]) for it in range(4)]
    assert of_calls(group_of(*rollouts))[1][1] == pytest.approx((0 - (0 + 1 / 3) / 2) * 3 / 4)
    assert of_calls(group_of(*same))[1][1] == pytest.approx(-0.25)


def test_unscored_rollouts_are_no_company_and_calls_with_rewards_of_their_own_keep_theirs():
    later = (*ROOT, 3)
    group = group_of(
        (1.0, [call_at(ROOT), replace(call_at(later), reward=2.0)]),
        (0.0, [call_at(ROOT), replace(call_at(later), reward=0.0)]),
        (None, [call_at(ROOT), call_at(later)]),
    )
    found = advantages(group, "branch")
    assert found.call_advantages[2] == (0.0, 0.0)
    assert found.call_advantages[0][1] == -found.call_advantages[1][1] == pytest.approx(2**-0.5, abs=1e-3)
    assert [it[0] for it in found.call_advantages[:2]] == pytest.approx(list(found.advantages[:2]))


@pytest.mark.parametrize("values", [(1.0, 1.0), (1.0,), (None, None), (1.0, None)])
def test_without_contrast_no_call_has_an_advantage(values):
    group = advantages(group_of(*((value, [call_at(ROOT), call_at((*ROOT, 3))]) for value in values)), "branch")
    assert not has_contrast(group) and group.call_advantages == ((0.0, 0.0),) * len(values)
