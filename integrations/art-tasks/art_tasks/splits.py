"""How the tasks of a fixed set are split: half for training, half held out."""

import random
from typing import TypeVar

T = TypeVar("T")
SEED = 0


def half(tasks: list[T], split: str) -> list[T]:
    """Return the half of ``tasks`` that belongs to ``split``; which task is in which half was drawn once."""
    drawn = list(tasks)
    random.Random(SEED).shuffle(drawn)
    middle = len(drawn) // 2
    return drawn[:middle] if split == "train" else drawn[middle:]
