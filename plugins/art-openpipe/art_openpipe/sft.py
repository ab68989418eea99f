"""Converts trajectories to imitate into art's. Only answers that have no recorded ids are rendered with the chat template."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from openai.types.chat.chat_completion import Choice

from art_core.errors import ConfigError
from art_core.types import Call
from art_core.types import Trajectory as Imitable
from art_embedded.rendering import Renderer
from art_openpipe.histories import LegacyHistory, messages_of
from art_openpipe.record import Key, Record, key_of
from art_openpipe.trajectories import Trajectory
from art_openpipe.types import TrainSFTConfig


def batches(trajectories: Sequence[Trajectory], config: TrainSFTConfig) -> Iterator[tuple[Any, float | None]]:
    """Yield the trajectories and the learning rate of each step."""
    rates = config.learning_rate if isinstance(config.learning_rate, list) else None
    size = config.batch_size
    if size == "auto":
        size = max(1, -(-len(trajectories) // len(rates))) if rates else 2
    if not isinstance(size, int) or size < 1 or not trajectories:
        got = f"{len(trajectories)} and batch_size={size!r}"
        raise ConfigError(f"train_sft needs at least one trajectory and a batch_size >= 1, got {got}")
    split = [trajectories[first : first + size] for first in range(0, len(trajectories), size)]
    if rates is not None and len(rates) != len(split):
        raise ConfigError(
            f"train_sft: {len(rates)} learning rates for {len(split)} batches of {size}; pass one per batch"
        )
    yield from zip(split, rates or [config.learning_rate] * len(split), strict=True)


async def imitable(record: Record, trajectories: Sequence[Trajectory], turns: str) -> list[Imitable]:
    """Return the trajectories with the token ids of all assistant messages, or of each trajectory's last one."""
    choices = [choice for trajectory in trajectories for choice in trajectory.choices()]
    recorded = await record.find(choices, strict=False)

    def calls_of(trajectory: Trajectory) -> tuple[Call, ...]:
        folder, histories = record.run.model_folder, trajectory.histories()
        calls = [call for history in histories for call in _calls(history, recorded, folder)]
        return tuple(calls[-1:] if turns == "last" else calls)

    return [Imitable(task=None, calls=calls_of(trajectory)) for trajectory in trajectories]


def _calls(history: LegacyHistory, recorded: dict[Key, Call], folder: str) -> Iterator[Call]:
    messages = messages_of(history.messages_and_choices)
    for index, item in enumerate(history.messages_and_choices):
        key = key_of(item) if isinstance(item, Choice) else None
        if key in recorded:
            yield recorded[key]
        elif messages[index].get("role") == "assistant":
            yield _renderer(folder).call(messages[:index], messages[index], tools=history.tools)


_renderer = functools.lru_cache(maxsize=1)(Renderer)  # needed for every batch
