"""What is printed after a run."""

import pytest

from art_cli.summary import verdict
from art_core import Report, Trajectory


def report(*successes: float, **added: float) -> Report:
    made = (
        Trajectory(task=index, calls=(), reward=value, metrics=dict(added)) for index, value in enumerate(successes)
    )
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
