"""Which lever the next part of the budget goes to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_improve.levers import TEACHER, WEIGHTS, Tranche, gain, next_lever

LEVERS = [TEACHER, WEIGHTS]


def tranche(lever, *rewards, rollouts=100):
    return Tranche(lever, rollouts, rewards)


def test_the_gain_is_the_rise_per_rollout_over_all_steps():
    assert gain([tranche(TEACHER, 0.1, 0.2)]) == pytest.approx(0.1 / 50)
    assert gain([tranche(TEACHER, 0.1, 0.2), tranche(TEACHER, 0.3, rollouts=50)]) == pytest.approx(0.1 / 50)
    assert gain([tranche(TEACHER, 0.4)]) == gain([]) == 0.0


def test_the_first_lever_begins_and_goes_on_as_long_as_it_gains_as_fast_as_at_first():
    assert next_lever([], LEVERS) == TEACHER
    assert next_lever([tranche(TEACHER, 0.1, 0.2)], LEVERS) == TEACHER
    assert next_lever([tranche(TEACHER, 0.1, 0.2), tranche(TEACHER, 0.3, 0.4)], LEVERS) == TEACHER


def test_an_untried_lever_is_tried_once_the_first_has_slowed_down_by_half():
    first = tranche(TEACHER, 0.1, 0.3)
    assert next_lever([first, tranche(TEACHER, 0.4, 0.5)], LEVERS) == TEACHER
    assert next_lever([first, tranche(TEACHER, 0.3, 0.3), tranche(TEACHER, 0.3, 0.31)], LEVERS) == WEIGHTS


def test_after_both_were_tried_the_one_that_gained_more_goes_on():
    slow = [tranche(TEACHER, 0.1, 0.3), tranche(TEACHER, 0.3, 0.3), tranche(TEACHER, 0.3, 0.32)]
    assert next_lever([*slow, tranche(WEIGHTS, 0.3, 0.4)], LEVERS) == WEIGHTS
    assert next_lever([*slow, tranche(WEIGHTS, 0.4, 0.3)], LEVERS) == TEACHER


def test_a_lever_that_loses_gives_way():
    assert next_lever([tranche(TEACHER, 0.3, 0.1)], LEVERS) == WEIGHTS


@given(st.lists(st.tuples(st.sampled_from(LEVERS), st.lists(st.floats(-1, 1), max_size=5)), max_size=8))
def test_it_is_always_one_of_the_levers_and_a_single_lever_keeps_everything(history):
    done = [tranche(lever, *rewards) for lever, rewards in history]
    assert next_lever(done, LEVERS) in LEVERS
    alone = [tranche(WEIGHTS, *rewards) for _, rewards in history]
    assert next_lever(alone, [WEIGHTS]) == WEIGHTS
