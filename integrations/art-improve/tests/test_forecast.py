"""What a budget will take, from what a part of it took."""

import pytest

from art_improve.forecast import Costs, costs


def test_costs_are_told_apart_from_the_start_of_engine_and_learner():
    steps = [
        {"seconds": 14.0, "step_seconds": 10.0, "rollouts": 20},
        {"seconds": 12.0, "step_seconds": 6.0, "rollouts": 60},
    ]
    assert costs({"seconds": 25.0}, 100, steps) == Costs(start=5.0, evaluation=25.0, searched=0.2, trained=0.3)


def test_what_is_to_come_is_the_sum_of_its_parts():
    known = Costs(start=5.0, evaluation=25.0, searched=0.2, trained=0.3)
    assert known.to_come(searched=0, trained=100, tranches=2, evaluations=1) == pytest.approx(2 * 5 + 30 + 25)
    assert known.to_come(searched=50, trained=0, tranches=0, evaluations=0) == pytest.approx(5 + 10)


def test_shorter_rollouts_make_everything_but_the_start_cheaper():
    known = Costs(start=5.0, evaluation=20.0, searched=0.2, trained=0.4).with_evaluation(10.0)
    assert known == Costs(start=5.0, evaluation=10.0, searched=0.1, trained=0.2)
