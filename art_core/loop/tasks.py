"""Which tasks a step trains on: a function of seed and step alone, so a resumed run draws the tasks that it would have drawn."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from art_core.config import TrainConfig


def batch_of_step(tasks: Sequence[Any], step: int, config: TrainConfig) -> list[Any]:
    """Return the tasks of a step, counted from 0: every epoch is all tasks in a new order, which depends on the seed only."""
    return [tasks[index] for index in _indices(len(tasks), step, config)]


def fresh_tasks(tasks: Sequence[Any], step: int, config: TrainConfig) -> Iterator[Any]:
    """Yield, without end, tasks for a step's extra rounds, in an order of its own; the step's own tasks come last."""
    order = _shuffled(len(tasks), f"{config.seed}/extra/{step}")
    own = set(_indices(len(tasks), step, config))
    return (tasks[index] for index in cycle(sorted(order, key=own.__contains__)))


def _indices(count: int, step: int, config: TrainConfig) -> list[int]:
    """Return the indices of a step's tasks among ``count`` tasks."""
    first = step * config.tasks_per_step
    epochs = (divmod(place, count) for place in range(first, first + config.tasks_per_step))
    return [_shuffled(count, f"{config.seed}/{epoch}")[place] for epoch, place in epochs]


@functools.lru_cache(maxsize=2)
def _shuffled(count: int, seed: str) -> Sequence[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
