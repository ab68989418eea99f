"""``art.utils.sft``: schedules and data sets for ``model.train_sft``."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from art_core.errors import ConfigError
from art_openpipe.trajectories import Trajectory
from art_openpipe.types import TrainSFTConfig

Schedule = Literal["cosine", "linear", "constant"]


class SFTChunk(NamedTuple):
    """The trajectories of one ``train_sft``, and the number of its first batch."""

    trajectories: list[Trajectory]
    config: TrainSFTConfig
    step: int
    epoch: int
    epoch_step: int


def create_lr_schedule(
    total_steps: int, peak_lr: float, method: Schedule = "linear", warmup_steps: int = 0, min_lr: float = 0.0
) -> list[float]:
    """Return a rate per step: a linear rise to ``peak_lr`` in the warmup, then the fall that ``method`` names to ``min_lr``."""
    falls = {"cosine": lambda x: (1 + math.cos(math.pi * x)) / 2, "linear": lambda x: 1 - x, "constant": lambda _: 1.0}
    if method not in falls:
        raise ConfigError(f"unknown schedule {method!r}; use one of {', '.join(falls)}")
    rise = [(step + 1) / warmup_steps for step in range(min(warmup_steps, total_steps))]
    last = max(1, total_steps - warmup_steps - 1)
    fall = [falls[method](step / last) for step in range(total_steps - len(rise))]
    return [min_lr + (peak_lr - min_lr) * share for share in (*rise, *fall)]


def create_sft_dataset_iterator(
    trajectories: Sequence[Trajectory],
    chunk_size: int = 10,
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    shuffle: bool = True,
    seed: int = 42,
    initial_step: int = 0,
    show_progress: bool = True,
) -> Iterator[SFTChunk]:
    """Yield the trajectories in chunks of ``chunk_size`` batches, with one schedule over all epochs, from ``initial_step`` on."""
    per_epoch = math.ceil(len(trajectories) / batch_size)
    rates = create_lr_schedule(per_epoch * epochs, peak_lr, schedule_type, int(per_epoch * epochs * warmup_ratio))
    chunks = [(epoch, first) for epoch in range(epochs) for first in range(0, per_epoch, chunk_size)]
    chunks = chunks[initial_step // chunk_size :]
    if show_progress:
        from tqdm.auto import tqdm

        chunks = tqdm(chunks, desc="SFT")
    for epoch, first in chunks:
        order = list(trajectories)
        if shuffle:
            random.Random(seed + epoch).shuffle(order)
        chosen = order[first * batch_size : (first + chunk_size) * batch_size]
        step = epoch * per_epoch + first
        of_chunk = rates[step : step + math.ceil(len(chosen) / batch_size)]
        config = TrainSFTConfig(learning_rate=of_chunk, batch_size=batch_size)
        yield SFTChunk(chosen, config, step, epoch, first)


def get_file_row_count(file_path: str | Path) -> int:
    """Return the number of lines of a JSONL file that are not empty."""
    with open(file_path) as file:
        return sum(1 for line in file if line.strip())


def iterate_file(
    file_path: str | Path, epochs: int = 1, shuffle_buffer_size: int = 10000, seed: int = 42, initial_skip: int = 0
) -> Iterator[Trajectory]:
    """Yield the trajectories of a JSONL file with ``{"messages": [...], "tools": [...]}`` per line, shuffled in every epoch.

    At most ``shuffle_buffer_size`` lines are in memory.
    """
    for line in islice(_lines(file_path, epochs, shuffle_buffer_size, seed), initial_skip, None):
        fields = json.loads(line)
        yield Trajectory(messages_and_choices=fields.get("messages", []), tools=fields.get("tools"))


def _lines(file_path: str | Path, epochs: int, size: int, seed: int) -> Iterator[str]:
    for epoch in range(epochs):
        chance, buffer = random.Random(seed + epoch), []
        with open(file_path) as file:
            for line in filter(str.strip, file):
                buffer.append(line)
                if len(buffer) >= size:
                    yield buffer.pop(chance.randrange(len(buffer)))
        yield from chance.sample(buffer, len(buffer))


async def train_sft_from_file(
    model: Any,
    file_path: str | Path,
    epochs: int = 1,
    batch_size: int = 2,
    peak_lr: float = 2e-4,
    schedule_type: Schedule = "linear",
    warmup_ratio: float = 0.1,
    initial_step: int = 0,
    final_step: int | None = None,
    shuffle_buffer_size: int = 10000,
    assistant_turns: Literal["all", "last"] = "all",
    **options: Any,
) -> None:
    """Train to imitate a file's conversations, from ``initial_step`` up to ``final_step``; ``options`` are of ``train_sft``."""
    batches = math.ceil(get_file_row_count(file_path) * epochs / batch_size)
    rates = create_lr_schedule(batches, peak_lr, schedule_type, int(batches * warmup_ratio))[initial_step:final_step]
    trajectories = iterate_file(file_path, epochs, shuffle_buffer_size, initial_skip=initial_step * batch_size)
    config = TrainSFTConfig(learning_rate=rates, batch_size=batch_size, assistant_turns=assistant_turns)
    if rates:
        await model.train_sft(islice(trajectories, len(rates) * batch_size), config, **options)
