"""The dashboard in a real browser, on unusual runs: many of them, the same answer several times, graded rewards."""

import os

import pytest
from recorded_runs import call, record

from art_core.store import Store

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]


def test_a_page_says_that_it_lists_the_newest_runs_only_and_names_an_older_one(tmp_path, desk):
    with Store(tmp_path / "run-000" / "run.sqlite"):
        pass
    for number in range(501):
        store = tmp_path / f"run-{number:03}" / "run.sqlite"
        store.parent.mkdir(exist_ok=True)
        store.touch()
        os.utime(store, (number + 1, number + 1))
    address = desk.view(tmp_path)
    desk.open(address).get_by_text("Only the newest 500 of 501 runs are listed").wait_for()
    page = desk.open(f"{address}#/run/run-000")
    assert page.get_by_label("Run", exact=True).input_value() == "run-000"


def test_the_same_answer_twice_has_the_details_of_both_its_calls(tmp_path, desk):
    question, again = {"role": "user", "content": "Where?"}, {"role": "user", "content": "Look again."}
    answer = {"role": "assistant", "content": "Nowhere."}
    with Store(tmp_path / "run" / "run.sqlite") as store:
        store.add_rollout("r", task="t", step=1, split="train", task_id="t")
        for number, messages in enumerate([[question], [question, answer, again]]):
            made = call((1, number), (2,), messages=messages, answer=answer["content"], request_id=f"q{number}")
            store.record("r", made)
        store.finish_rollout("r", output="Nowhere.")
    address = desk.view(tmp_path)
    for path in ("rollout/r", "compare?task_id=t&a=r"):
        page = desk.open(f"{address}#/run/run/{path}")
        page.get_by_text("Look again.").first.wait_for()
        answers = page.locator(".messages").first.locator(".message.assistant .who").all_inner_texts()
        assert ["call 0" in answers[0], "call 1" in answers[1]] == [True, True], answers


def test_graded_evaluations_are_shown_with_the_rewards(tmp_path, desk):
    with Store(record(tmp_path / "run") / "run.sqlite") as store:
        rows = [{**row, "counts_successes": False} for row in store.meta("evaluations")]
        store.set_meta("evaluations", rows)
        for step in (1, 2, 3):
            store.add_step(step, {"reward": 0.1 * step, "groups_with_contrast": 1.0})
    page = desk.open(f"{desk.view(tmp_path)}#/run/run")
    large = page.locator(".charts.large figure")
    large.first.wait_for()
    assert large.count() == 1 and large.get_attribute("aria-label") == "Reward"
    assert "held-out tasks" in large.inner_text()


def test_rewards_of_calls_alone_have_the_large_chart(tmp_path, desk):
    with Store(record(tmp_path / "run") / "run.sqlite") as store:
        store.set_meta("evaluations", [])
        for step in (1, 2, 3):
            store.add_step(step, {"reward": 0.0, "call_reward": 0.1 * step, "groups_with_contrast": 1.0})
    page = desk.open(f"{desk.view(tmp_path)}#/run/run")
    large = page.locator(".charts.large figure")
    large.first.wait_for()
    assert large.count() == 1 and large.get_attribute("aria-label") == "Call reward"
