"""Work of others that may never end is interrupted, and nothing is interrupted after it."""

import threading
import time

import pytest

from art_core.threads import Overtime, interrupted_after


def forever():
    while True:
        time.sleep(0)


def test_work_that_does_not_end_is_interrupted_and_work_that_ends_returns():
    with pytest.raises(Overtime):
        interrupted_after(0.01, forever)
    assert interrupted_after(10, lambda: "done") == "done"
    with pytest.raises(ZeroDivisionError):
        interrupted_after(10, lambda: 1 / 0)


def test_the_time_begins_with_the_work_and_nothing_is_interrupted_before_or_after_it(monkeypatch):
    """On a busy machine the watching thread takes a while to start: an interrupt in its start was repeated for ever."""
    start = threading.Thread.start

    def slowly(thread):
        start(thread)
        for _ in range(10):
            time.sleep(0.005)

    monkeypatch.setattr(threading.Thread, "start", slowly)
    before = threading.active_count()
    assert interrupted_after(0.03, lambda: "done") == "done"
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
