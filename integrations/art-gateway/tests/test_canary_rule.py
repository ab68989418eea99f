"""The rule by which a candidate's share changes: how often it is wrong, and how soon it is right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_gateway.canary.bounds import Bounds
from art_gateway.canary.trial import Rule, Trial
from bench import canary_rule

RULE = Rule(ramp=(0.1, 0.25, 0.5), margin=0.3)
SIMULATIONS = 60


def outcome(random, candidate, live, *, share=0.5, conversations=1200, fails=0.0, against=True):
    """Return the first verdict on scores of 0 and 1 with these means, which may be functions of the conversation's number.

    ``against``: whether a verdict against the candidate ends it, as it does in truth.
    """
    trial = Trial(RULE, share)
    for number in range(conversations):
        answers = random.random() < share
        mean = candidate if answers else live
        trial.add_score(float(random.random() < (mean(number) if callable(mean) else mean)), candidate=answers)
        if answers:
            trial.add_call(failed=random.random() < fails)
        if number % 20 == 0 and (verdict := trial.verdict()) and (verdict.passed or against):
            return verdict.passed
    return None


def outcomes(*args, **settings):
    found = [outcome(np.random.default_rng(seed), *args, **settings) for seed in range(SIMULATIONS)]
    return {verdict: found.count(verdict) for verdict in (True, False, None)}


def test_a_candidate_that_is_as_good_is_hardly_ever_rolled_back():
    assert outcomes(0.8, 0.8)[False] <= RULE.alpha * SIMULATIONS


def test_a_candidate_that_is_worse_by_the_margin_hardly_ever_gets_more():
    found = [outcome(np.random.default_rng(seed), 0.5, 0.8, against=False) for seed in range(SIMULATIONS)]
    assert found.count(True) <= RULE.alpha * SIMULATIONS


def test_a_candidate_that_is_worse_by_twenty_points_is_rolled_back():
    assert outcomes(0.6, 0.8)[False] >= 0.9 * SIMULATIONS


def test_a_candidate_that_is_as_good_gets_more():
    assert outcomes(0.8, 0.8)[True] >= 0.9 * SIMULATIONS


@pytest.mark.parametrize("order", ["one after the other", "one side first"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_scores_count_in_whatever_order_they_arrive(share, order):
    trial = Trial(RULE, share)
    scores = [(number % 20 > 0, number % 20 < 20 * share) for number in range(1000)]
    for good, candidate in sorted(scores, key=lambda it: it[1]) if order == "one side first" else scores:
        trial.add_score(float(good) if candidate else 1.0, candidate=candidate)
    assert trial.all.difference.count >= 0.9 * 1000 * min(share, 1 - share)


def test_a_candidate_whose_calls_are_often_answered_by_the_other_side_gets_no_more():
    trial = Trial(RULE, 0.5)
    for _ in range(500):
        trial.add_call(failed=False)
        trial.add_score(1.0, candidate=True)
        trial.add_score(1.0, candidate=False)
    assert trial.verdict().passed
    trial.missed = 100
    assert trial.verdict() is None


def test_a_candidate_that_often_fails_is_rolled_back():
    assert outcomes(0.8, 0.8, fails=0.2, conversations=600)[False] >= 0.9 * SIMULATIONS


def test_what_gets_worse_for_both_is_not_held_against_the_candidate():
    def harder(number):
        return 0.9 if number < 400 else 0.3

    assert outcomes(harder, harder)[False] <= RULE.alpha * SIMULATIONS


def test_a_candidate_that_turns_bad_after_a_long_good_time_is_found():
    trial, random = Trial(RULE, 0.5), np.random.default_rng(0)
    for number in range(6000):
        answers = random.random() < 0.5
        mean = 0.4 if answers and number >= 3000 else 0.8
        trial.add_score(float(random.random() < mean), candidate=answers)
        if number >= 3000 and trial.newest.against():
            break
    assert number < 4000 and trial.newest.against() is not None


@given(st.lists(st.floats(0, 1), max_size=50))
def test_bounds_enclose_each_other_as_observations_arrive(values):
    bounds = Bounds(0.05)
    for value in values:
        lower, upper = bounds.lower, bounds.upper
        bounds.add(value)
        assert lower <= bounds.lower and bounds.upper <= upper


@pytest.mark.parametrize("mean", [0.02, 0.5, 0.97])
def test_the_mean_is_hardly_ever_outside_its_bounds_at_any_time(mean):
    missed = 0
    for seed in range(SIMULATIONS):
        bounds = Bounds(0.1)
        for value in np.random.default_rng(seed).random(300) < mean:
            bounds.add(float(value))
        # What was ruled out once stays so: the last bounds are the narrowest.
        missed += not bounds.lower <= mean <= bounds.upper
    assert missed <= 0.1 * SIMULATIONS


def test_bounds_are_as_narrow_as_the_number_of_observations_allows():
    bounds = Bounds(0.05)
    for number in range(1000):
        bounds.add(float(number % 5 > 0))
    # At a single time it would be 0.05 wide.
    assert bounds.lower < 0.8 < bounds.upper and bounds.upper - bounds.lower < 0.15


@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_an_observation_outside_of_its_range_is_refused(value):
    with pytest.raises(ValueError, match="between 0 and 1"):
        Bounds(0.05).add(value)


def test_the_simulations_of_the_page_can_be_repeated(capsys):
    canary_rule.main(["--simulations", "1"])
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert last.count("%") == 4 and "100.0%, after" in last
