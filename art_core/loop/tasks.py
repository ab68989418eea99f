"""Tasks by name, and which of them a step trains on: a function of seed and step, so a resumed run draws the same."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.plugins import Plugins
from art_core.types import Tasks


def tasks(name: str, split: str = "train", **options: Any) -> Tasks:
    """Return tasks of an installed suite: ``tasks("bfcl/simple")``, ``tasks("reasoning-gym/chain_sum", split="test", size=200)``.

    ``split`` is ``"train"`` or ``"test"``, which have no task in common. The result is a list, with ``reward``, ``agent()`` and
    ``origin``. ``art tasks`` lists the suites with their options. Raises ConfigError for a name or option that doesn't exist.
    """
    if split not in ("train", "test"):
        raise ConfigError(f"split must be 'train' or 'test', got {split!r}")
    suite, _, inside = name.partition("/")
    load = Plugins().choose("register_tasks", suite).load
    try:
        inspect.signature(load).bind(inside, split, **options)
    except TypeError as error:
        raise ConfigError(f"tasks of {suite!r}: {error}; art tasks lists the suites") from None
    return load(inside, split, **options)


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
