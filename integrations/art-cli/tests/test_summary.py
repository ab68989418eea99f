"""What is printed after a run."""

import pytest

from art_cli.chart import drawn_metric
from art_cli.summary import advice, verdict
from art_core import Report, TrainResult, Trajectory
from art_core.store import Store


def report(*rewards: float | None) -> Report:
    made = (Trajectory(task=index, calls=(), reward=value) for index, value in enumerate(rewards))
    return Report(trajectories=tuple(made), temperature=None)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ([0, 0, 0, 1] * 25, [0, 1, 1, 1] * 25, "better: +50 points of success (95 %: +40.4 to +59.6) on the same 100 tasks"),
        ([1, 1, 1, 1] * 25, [0, 1, 1, 1] * 25, "worse: -25 points"),
        ([0, 1, 0, 1] * 25, [1, 0, 0, 1] * 25, "can't tell whether it is better: +0 points of success (95 %: -13.8 to +13.8)"),
        ([0], [1], "can't tell"),
        ([0.25, 0.5] * 25, [0.75, 1.25] * 25, "better: +0.625 of mean reward (95 %: +0.59 to +0.66)"),
    ],
)  # fmt: skip
def test_the_verdict_compares_the_same_tasks(before, after, said):
    assert verdict(report(*before), report(*after)).startswith(said)


def test_the_verdict_leaves_out_tasks_that_the_judge_could_not_score():
    before = report(*[1] * 15, *[0] * 20, *[1] * 15)
    after = report(*[1] * 20, *[0] * 15, *[None] * 15)
    said = verdict(before, after)
    assert said.startswith("better: +14.3 points of success")
    assert said.endswith("on the same 35 tasks; 15 without a score before or after left out")


def test_a_rollout_whose_agent_failed_is_compared_as_unsolved():
    failed = (Trajectory(task=index, calls=(), error="no answer") for index in range(20))
    assert verdict(report(*[1] * 20), Report(tuple(failed), temperature=None)).startswith("worse: -100 points")


def test_without_any_task_scored_both_times_there_is_no_verdict():
    said = verdict(report(1, None), report(None, 0))
    assert said == "can't tell whether it is better: no task was scored both before and after"


def test_graded_rewards_before_are_not_called_successes_after():
    assert verdict(report(*[0.41] * 20), report(*[1] * 20)).startswith("better: +0.59 of mean reward")


def test_the_verdict_on_few_graded_tasks_says_how_many_an_interval_needs():
    said = verdict(report(0.2, 0.3), report(0.3, 0.5))
    assert (
        said == "can't tell whether it is better: +0.15 of mean reward (an interval needs 10 tasks) on the same 2 tasks"
    )


@pytest.mark.parametrize(("before", "text"), [(1, "Train and evaluate on harder tasks"), (0, "Train longer")])
def test_longer_training_is_advised_only_if_a_task_was_not_solved(tmp_path, before, text):
    with Store(tmp_path / "run.sqlite"):
        found = TrainResult(tmp_path, {"steps": 2}, report(before, 1, 1), report(1, 1, 1))
    assert advice(found, [])[0].text.startswith(text)


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ([{"reward": 0.0, "call_reward": 0.5}], "call_reward"),
        ([{"reward": 0.1, "call_reward": 0.5}], "reward"),
        ([{"reward": 0.0}], "reward"),
        ([{"reward": 0.0, "call_reward": 0.5, "success": 0.0}], "success"),
    ],
)
def test_the_chart_draws_what_is_rewarded(steps, name):
    assert drawn_metric(steps) == name
