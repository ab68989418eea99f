"""The first screen answers what a person decides by, for five kinds of runs, on a desktop and on a phone; runs are compared."""

import json

import pytest
from kinds_of_runs import KINDS, run_of
from test_dashboard import assert_no_horizontal_scroll

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

DESKTOP, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
ANSWERS = {
    "improved": ("Better", "20.0 % → 72.5 %", "22 better, 1 worse", "6 wrong name", "art export"),
    "flat": ("Can't tell whether it is better", "20.0 % → 20.0 %", "1 better, 1 worse", "15 wrong date", "--steps 18"),
    "stopped": (
        "Can't tell whether it is better",
        "Stopped: all rewards were equal",
        "17 wrong name",
        "art train --resume",
    ),
    "crashed": (
        "Not measured before and after training",
        "Crashed: RuntimeError: CUDA",
        "16 wrong",
        "art train --resume",
    ),
    "hacked": (
        "Check the reward before you trust this run",
        "on 40 held-out tasks it went from 0.2",
        "18 wrong",
        "Rollouts with the best rewards",
    ),
}
"""What each kind's first screen says: a verdict, why, what fails, and what next."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    for kind in KINDS:
        run_of(root / kind, kind)
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_screen_answers_all_questions(runs, desk, kind):
    page = desk.open(f"{desk.view(runs)}#/run/{kind}", viewport=DESKTOP)
    page.wait_for_selector(".verdict")
    text = " ".join(page.locator(".decision").inner_text().split())
    for answer in ANSWERS[kind]:
        assert answer in text, (answer, text)
    assert ("5 min of training" if kind in ("stopped", "crashed") else "9 min of training") in text
    box = page.locator(".decision").bounding_box()
    assert box["y"] + box["height"] <= DESKTOP["height"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_screen_fits_a_phone(runs, desk, scheme):
    page = desk.open(f"{desk.view(runs)}#/run/hacked", viewport=PHONE, color_scheme=scheme)
    page.wait_for_selector(".verdict")
    assert page.locator(".verdict").bounding_box()["y"] < PHONE["height"] / 2
    assert_no_horizontal_scroll(page)


def test_a_failing_task_opens_both_of_its_rollouts(runs, desk):
    page = desk.open(f"{desk.view(runs)}#/run/improved")
    page.locator(".questions .tasks a").first.click()
    page.wait_for_selector(".side-by-side .message")
    chosen = [select.locator("option:checked").inner_text() for select in page.locator(".side-head select").all()]
    assert chosen == ["step 0 · eval, temperature 1 · reward 1", "step 9 · eval, temperature 1 · reward 0"]


def test_compare_opens_on_a_task_that_was_lost(runs, desk):
    page = desk.open(f"{desk.view(runs)}#/run/improved/compare")
    page.wait_for_selector(".side-by-side .message")
    assert page.get_by_role("heading", level=1).inner_text() == "Question 0?"
    assert page.get_by_label("Task").locator("option").first.inner_text() == "−1 Question 0?"


def test_trajectories_are_searched_and_filtered(runs, desk):
    page = desk.open(f"{desk.view(runs)}#/run/improved/rollouts")
    page.get_by_label("Search").fill("mailbox OR question 39")
    page.get_by_text("No trajectories").wait_for()
    page.get_by_label("Search").fill("question 3")
    page.get_by_text("22 trajectories").wait_for()
    page.get_by_label("Outcome").select_option("error")
    page.get_by_text("2 trajectories", exact=True).wait_for()
    assert "ValueError: no inbox" in page.locator("tbody").inner_text() and "search=question+3" in page.url
    again = desk.open(page.url)  # the filters are in the URL
    again.get_by_text("2 trajectories", exact=True).wait_for()


def test_trajectories_are_ordered_by_the_change_of_their_tasks(runs, desk):
    page = desk.open(f"{desk.view(runs)}#/run/improved/rollouts")
    page.get_by_label("Order").select_option("changed")
    rows = page.locator("tbody tr")
    rows.nth(0).get_by_text("−1 since before training").wait_for()
    assert "Question 0?" in rows.nth(0).inner_text()
    assert "+1 since before training" in rows.nth(1).inner_text() and "order=changed" in page.url


def test_two_runs_are_compared(runs, desk):
    page = desk.open(desk.view(runs))
    page.get_by_label("Select flat").check()
    page.get_by_label("Select improved").check()
    page.get_by_role("link", name="Compare improved with flat").click()
    page.wait_for_selector(".verdict")
    text = page.locator(".verdict").inner_text()
    assert text.startswith("Better") and "20.0 % → 72.5 %" in text and "21 better, 0 worse" in text
    assert "; McNemar's p < 0.001)" in text
    page.wait_for_selector(".measures tbody tr")
    measures = {
        name: values
        for name, *values in (row.locator("td").all_inner_texts() for row in page.locator(".measures tbody tr").all())
    }
    assert "Success" not in measures and measures["Sampled tokens"] == ["2", "2", "0 (0 to 0)"]
    assert measures["Seconds, p50"][0] == "20.5" and measures["Seconds, p95"][0] == "38.0"
    page.locator("tbody[data-list] tr").first.get_by_role("link").last.click()
    page.wait_for_url(lambda url: "#/run/improved/rollout/after-9" in url)


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE])
def test_a_task_that_changed_shows_the_transcripts_of_both_runs(runs, desk, viewport):
    page = desk.open(f"{desk.view(runs)}#/run/improved/versus/hacked", viewport=viewport)
    page.get_by_text("24 tasks with another result").wait_for()
    assert_no_horizontal_scroll(page)
    page.get_by_role("link", name="Question 6?").click()  # lost: solved by improved only
    page.get_by_role("heading", name="Question 6?", level=1).wait_for()
    for side, run, reward in (("First run", "improved", 1), ("Second run", "hacked", 0)):
        transcript = page.get_by_label(side)
        transcript.get_by_text("answer 6").wait_for()
        assert transcript.get_by_role("link", name=run).is_visible()
        assert transcript.get_by_text(f"reward {reward}", exact=True).is_visible()
    assert_no_horizontal_scroll(page)
    assert page.get_by_label("Task").locator("option:checked").inner_text() == "−1 Question 6?"
    page.get_by_label("Task").select_option("−1 Question 7?")
    page.get_by_role("heading", name="Question 7?", level=1).wait_for()
    again = desk.open(page.url)  # both rollouts are in the URL
    again.get_by_role("heading", name="Question 7?", level=1).wait_for()
    again.get_by_role("link", name="hacked compared with improved").click()
    again.get_by_text("24 tasks with another result").wait_for()


def test_runs_are_searched(runs, desk):
    page = desk.open(desk.view(runs))
    page.get_by_label("Search runs").fill("crashed")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1")
    assert "CUDA out of memory" in page.locator("tbody").inner_text()


def test_numerical_health_is_a_line_that_unfolds(runs, desk):
    page = desk.open(f"{desk.view(runs)}#/run/improved")
    line = page.locator(".health > summary")
    line.get_by_text("differ by 1e-05 nats per token").wait_for()
    assert not page.get_by_label("loss").first.is_visible()
    line.click()
    page.locator(".health .u-wrap").first.wait_for()


ROUND = {
    "name": "improved", "began": 1.79e9, "start": "runs/mine", "new": 48, "older": 40, "held_out": 40, "held_out_new": 8,
    "state": "accepted", "why": "holds: success >= current - 0.02", "ended": 1.79e9 + 900, "measure": "success",
    "before": {"success": 0.2, "counts_successes": True}, "after": {"success": 0.725, "counts_successes": True},
    "difference": 0.525, "interval": [0.36, 0.66], "rollouts": 320, "seconds": 540.0, "judge_cost": 1.5,
}  # fmt: skip


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE])
def test_a_folder_of_rounds_shows_what_each_changed_and_cost(tmp_path, desk, viewport):
    run_of(tmp_path / "improved", "improved")
    begun = {"name": "round-002", "state": "training", "start": "runs/rounds/improved", "new": 20, "older": 20}
    (tmp_path / "rounds.json").write_text(json.dumps([ROUND, begun]))
    page = desk.open(desk.view(tmp_path), viewport=viewport)
    page.wait_for_selector(".rounds tbody tr")
    training, accepted = (" ".join(row.inner_text().split()) for row in page.locator(".rounds tbody tr").all())
    assert training.startswith("round-002 from runs/rounds/improved") and "20 new, 20 older" in training
    for shown in ("accepted", "holds: success", "20.0 % → 72.5 %", "+52.5 points", "95 %: +36 to +66", "9 min, $1.50"):
        assert shown in accepted, (shown, accepted)
    assert_no_horizontal_scroll(page)
    page.get_by_role("link", name="improved").first.click()
    page.wait_for_selector(".verdict")
