"""What waits for a server that is away: it is asked rarely meanwhile, and once more at the end."""

from types import SimpleNamespace

import pytest

from art_langfuse import outbox
from art_langfuse.outbox import NotDelivered, Outbox, Refused, Temporary


class Slow:
    """A server that says nothing for ten seconds of a clock that only it moves; then it may be back."""

    def __init__(self):
        self.now, self.asked, self.away, self.taken = 0.0, 0, True, []

    def post(self, batch):
        self.asked += 1
        if self.away:
            self.now += 10
            raise Temporary("says nothing")
        self.taken += batch


@pytest.fixture
def server(monkeypatch):
    server = Slow()
    monkeypatch.setattr(outbox, "PATIENCE", 0.0)
    monkeypatch.setattr(outbox, "time", SimpleNamespace(monotonic=lambda: server.now))
    return server


def test_a_server_that_says_nothing_is_asked_half_of_the_time_and_once_more_at_the_end(server):
    box = Outbox("scores", server.post, batch=10)
    for item in range(3):
        with pytest.raises(NotDelivered, match=f"scores: {item + 1} wait to be sent again: says nothing"):
            box.deliver([item])
    assert server.asked == 1
    server.now += 10
    with pytest.raises(NotDelivered, match="4 wait"):
        box.deliver([3])
    assert server.asked == 2
    server.away = False
    box.close()
    assert server.taken == [0, 1, 2, 3]


def test_what_was_never_taken_is_counted_at_the_end(server):
    box = Outbox("scores", server.post, batch=10)
    with pytest.raises(NotDelivered, match="2 wait"):
        box.deliver([0, 1])
    with pytest.raises(NotDelivered, match="2 were never sent: says nothing"):
        box.close()


class Picky:
    """A server that refuses batches with an item it does not like."""

    def __init__(self, bad):
        self.bad, self.asked, self.taken = bad, 0, []

    def post(self, batch):
        self.asked += 1
        if self.bad.intersection(batch):
            raise Refused("not a number")
        self.taken += batch


def test_items_that_are_all_refused_take_about_one_request_each():
    picky = Picky(set(range(160)))
    with pytest.raises(NotDelivered, match="160 were refused and skipped: not a number"):
        Outbox("scores", picky.post, batch=100).deliver(range(160))
    assert picky.asked < 160 + 10


def test_one_refused_item_among_many_is_found_and_the_others_arrive():
    picky = Picky({420})
    with pytest.raises(NotDelivered, match="1 were refused"):
        Outbox("scores", picky.post, batch=100).deliver(range(1000))
    assert picky.taken == [item for item in range(1000) if item != 420]
    assert picky.asked < 35
