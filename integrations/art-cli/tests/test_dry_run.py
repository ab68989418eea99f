"""A dry run says whether its group teaches, what is wrong, and what the whole run would take."""

import pytest

from art_cli.dry_run import duration, interpretation

REPORT = {
    "rewards": [0.0, 1.0, 0.5, 1.0], "errors": [], "unscored": [], "has_contrast": True, "calls": 8, "tokens": 900,
    "targets": 300, "tokens_call_by_call": 4000, "rollout_seconds": 6.0, "learn_seconds_per_step": 4.0, "account": {},
}  # fmt: skip
CONFIG = {"tasks_per_step": 8}


def said(steps=20, **changes):
    return " ".join(interpretation({**REPORT, **changes}, CONFIG, steps))


def test_rewards_that_differ_teach():
    text = said()
    assert "The group teaches: its rewards range from 0 to 1." in text
    assert "computes 900 tokens; call by call they would be 4,000." in text


def test_equal_rewards_teach_nothing_and_missing_ones_are_named():
    assert "teaches nothing: all its rewards are 0.25" in said(rewards=[0.25] * 4, has_contrast=False)
    assert "was not scored, so it teaches nothing: no judge" in said(rewards=[None] * 4, unscored=["no judge"])


def test_rewards_that_differ_only_outside_the_trained_nodes_teach_nothing():
    assert "no call of a trained node" in said(has_contrast=False)
    assert said(rewards=[1.0] * 4).startswith("The group teaches. ")


def test_a_group_whose_calls_were_all_cut_off_teaches_nothing_whatever_its_rewards():
    assert "teaches nothing: every call was cut off at its token limit" in said(targets=0)


def test_failed_rollouts_are_counted():
    assert "2 of 4 rollouts failed, the first with: KeyError: 'x'" in said(errors=["KeyError: 'x'", "ValueError"])


def test_the_whole_run_is_projected():
    text = said()
    assert "20 steps like this: 640 rollouts, 1,280 trained model calls, 3 min to 17 min." in text
    judged = said(account={"judge/cost": 0.01, "judge/requests": 1.0})
    assert "$1.60 for the judge, 160 requests to it" in judged


@pytest.mark.parametrize(("seconds", "text"), [(42.4, "42 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations_are_written_as_people_write_them(seconds, text):
    assert duration(seconds) == text
