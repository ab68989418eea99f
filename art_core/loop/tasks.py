"""Which tasks a step trains on: a function of seed and step alone, so a resumed run draws what it would have drawn."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from art_core.config import TrainConfig


def batch_of_step(tasks: Sequence[Any], step: int, config: TrainConfig) -> list[Any]:
    """Return the tasks of a step: every epoch is a fresh order of all tasks, and the same for the same seed."""
    return [tasks[index] for index in _places(len(tasks), step, config)]


def fresh_tasks(tasks: Sequence[Any], step: int, config: TrainConfig) -> Iterator[Any]:
    """Yield, without end, the tasks for a step's extra rounds: all others first, in an order of this step's own."""
    order = list(range(len(tasks)))
    random.Random(f"{config.seed}/extra/{step}").shuffle(order)
    order.sort(key=set(_places(len(tasks), step, config)).__contains__)
    return (tasks[index] for index in cycle(order))


def _places(count: int, step: int, config: TrainConfig) -> list[int]:
    """Return the indices of a step's tasks among ``count`` tasks."""
    first = step * config.tasks_per_step
    orders: dict[int, list[int]] = {}
    places = []
    for index in range(first, first + config.tasks_per_step):
        epoch, place = divmod(index, count)
        if epoch not in orders:
            orders[epoch] = list(range(count))
            random.Random(f"{config.seed}/{epoch}").shuffle(orders[epoch])
        places.append(orders[epoch][place])
    return places
