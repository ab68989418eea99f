"""``art.utils.sft``: reads trajectories to imitate from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from art_openpipe.trajectories import Trajectory
from art_openpipe.types import TrainSFTConfig


def create_sft_dataset_iterator(path: str | Path, epochs: int = 1, seed: int = 42) -> Iterator[list[Trajectory]]:
    """Yield each epoch's trajectories, newly shuffled, from a JSONL file with ``{"messages": [...], "tools": [...]}`` per
    line."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line.strip()]
    for epoch in range(epochs):
        order = list(lines)
        random.Random(f"{seed}/{epoch}").shuffle(order)
        yield [Trajectory(messages_and_choices=line["messages"], tools=line.get("tools")) for line in order]


async def train_sft_from_file(
    model: Any, file_path: str | Path, epochs: int = 1, batch_size: int = 2, peak_lr: float = 2e-4, seed: int = 42
) -> None:
    """Train to imitate the conversations in a file, with ``peak_lr`` as the learning rate of every batch."""
    for trajectories in create_sft_dataset_iterator(file_path, epochs, seed):
        await model.train_sft(trajectories, TrainSFTConfig(learning_rate=peak_lr, batch_size=batch_size))
