"""Two measurements of the same tasks: the difference, its interval, and what they say."""

import itertools

import pytest

from art_cli.change import change, score, score_interval


@pytest.mark.parametrize(
    ("before", "after", "verdict", "value", "interval"),
    [
        ([0, 0, 0, 1] * 25, [0, 1, 1, 1] * 25, "better", 0.5, (0.404, 0.596)),
        ([1, 1, 1, 1] * 25, [0, 1, 1, 1] * 25, "worse", -0.25, (-0.343, -0.174)),
        ([0, 1, 0, 1] * 25, [1, 0, 0, 1] * 25, "can't tell", 0.0, (-0.138, 0.138)),
        ([0.25, 0.5] * 25, [0.75, 1.25] * 25, "better", 0.625, (0.590, 0.660)),
    ],
)
def test_a_change_has_a_verdict_and_an_interval(before, after, verdict, value, interval):
    it = change(before, after)
    assert (it.verdict, it.value, it.tasks) == (verdict, pytest.approx(value), len(before))
    assert (it.low, it.high) == pytest.approx(interval, abs=0.002)


def test_three_solved_tasks_of_three_are_not_yet_better():
    assert change([0, 0, 0], [1, 1, 1]).verdict == "can't tell"
    assert change([0] * 6, [1] * 6).verdict == "better"


def test_few_graded_tasks_say_nothing():
    assert change([0.2, 0.3], [0.3, 0.41]).verdict == "can't tell"
    assert change([0.2] * 10, [0.3] * 9 + [0.31]).verdict == "better"


def test_one_task_says_nothing():
    assert change([0.2], [0.9]).verdict == "can't tell" and change([0], [1]).verdict == "can't tell"


def test_tasks_that_changed_are_counted():
    it = change([1, 0, 1, 0.5], [0, 1, 1, 0.25])
    assert (it.lost, it.won) == (2, 1)


def test_the_score_statistic_is_mcnemars_at_no_difference_and_falls():
    assert score(5, 15, 100, 0.0) == pytest.approx(10 / 20**0.5)
    for lost, won, tasks in ((5, 15, 100), (0, 0, 50), (3, 0, 10), (0, 10, 10), (10, 0, 10)):
        values = [score(lost, won, tasks, step / 100) for step in range(-99, 100)]
        assert all(a >= b - 1e-9 for a, b in itertools.pairwise(values))
        low, high = score_interval(lost, won, tasks, 1.96)
        assert -1 <= low <= (won - lost) / tasks <= high <= 1 and low < high


def test_the_interval_is_the_published_one():
    # Airway hyper-responsiveness before and after a transplantation: Fagerland, Lydersen, Laake, Statistics in Medicine 33, 2014.
    assert score_interval(7, 1, 21, 1.959964) == pytest.approx((-0.517, -0.026), abs=0.0005)
