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
    start, started = threading.Thread.start, []

    def slowly(thread):
        start(thread)
        if threading.current_thread() is threading.main_thread():  # not what other tests left running
            started.append(thread)
        for _ in range(10):
            time.sleep(0.005)

    monkeypatch.setattr(threading.Thread, "start", slowly)
    assert interrupted_after(0.03, lambda: "done") == "done"
    assert started
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()
