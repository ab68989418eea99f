"""The dashboard in a real browser, on unusual runs: many of them, the same answer several times, graded rewards."""

import os

import pytest

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
