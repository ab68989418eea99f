"""Which row a prompt gets, and when rows are added: the table alone, with a cache that stores nothing."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor

from art_embedded.kv import Batch
from art_embedded.rows import SMALLEST_CAPACITY, Rows


class NoKeyValues:
    shares_prefixes = True
    token_bytes = 1

    def resize(self, rows: int, capacity: int) -> None: ...

    def copy(self, source: int, target: int, length: int) -> None: ...

    def swap(self, a: int, b: int, lengths: tuple[int, int]) -> None: ...

    def forward(self, batch: Batch) -> Tensor:
        raise NotImplementedError


class Occupant:
    row = -1


def prompt(number: int) -> np.ndarray:
    """100 tokens that begin as no other prompt does."""
    return np.arange(100, dtype=np.int32) + 1000 * number


def serve(rows: Rows, number: int) -> int:
    """Run one prompt to its end; return how much of it was there already."""
    occupant = Occupant()
    assert rows.fit(120) and rows.place(occupant, prompt(number))
    there = int(rows.lengths[occupant.row])
    rows.lengths[occupant.row] = 100
    rows.release(occupant)
    return there


@pytest.fixture
def rows() -> Rows:
    """Room for 64 rows."""
    return Rows(NoKeyValues(), budget=64 * SMALLEST_CAPACITY, most=1000)


def test_rows_are_added_for_prefixes_up_to_half_of_the_budget_and_then_idle_ones_are_taken(rows):
    for number in range(200):
        serve(rows, number)
    assert rows.count == 32


def test_what_was_used_recently_is_still_there_when_the_budget_is_far_from_reached(rows):
    for number in range(30):
        serve(rows, number)
    assert [serve(rows, number) for number in range(30)] == [99] * 30


def test_the_row_that_was_used_least_recently_is_the_one_to_go(rows):
    for number in range(32):
        serve(rows, number)
    serve(rows, 0)
    serve(rows, 32)
    assert serve(rows, 0) == 99
    assert serve(rows, 1) == 0


def test_rows_in_use_may_take_the_whole_budget(rows):
    occupants = [Occupant() for _ in range(65)]
    placed = [rows.fit(120) and rows.place(occupant, prompt(number)) for number, occupant in enumerate(occupants)]
    assert placed == [True] * 64 + [False]
    assert rows.count == 64


def test_rows_are_short_again_when_nothing_long_was_asked_for_since_the_last_weights(rows):
    assert rows.fit(4 * SMALLEST_CAPACITY)
    serve(rows, 0)
    rows.clear()
    assert rows.capacity == 4 * SMALLEST_CAPACITY, "it will be needed again"
    serve(rows, 0)
    rows.clear()
    assert rows.capacity == SMALLEST_CAPACITY
    for number in range(64):
        assert rows.fit(120) and rows.place(Occupant(), prompt(number))
