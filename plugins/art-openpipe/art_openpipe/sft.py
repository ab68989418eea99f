"""Converts trajectories to imitate into art's, with token ids.

The model's own choices keep the ids that were sampled. Only messages by others, which have none, are rendered with the model's
chat template.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from openai.types.chat.chat_completion import Choice

from art_core.errors import ConfigError
from art_core.types import Call
from art_core.types import Trajectory as Imitable
from art_embedded.rendering import Renderer
from art_openpipe.record import Key, Record, key_of
from art_openpipe.trajectories import Trajectory, messages_of
from art_openpipe.types import MessagesAndChoices, Tools, TrainSFTConfig

AUTO = 2
"""Default number of trajectories per optimizer step."""


def batches(
    trajectories: Sequence[Trajectory], config: TrainSFTConfig
) -> Iterator[tuple[list[Trajectory], float | None]]:
    """Yield the trajectories and the learning rate of each step."""
    rates = config.learning_rate if isinstance(config.learning_rate, list) else None
    size = config.batch_size
    if size == "auto":
        size = max(1, -(-len(trajectories) // len(rates))) if rates else AUTO
    if not isinstance(size, int) or size < 1 or not trajectories:
        raise ConfigError(
            f"train_sft needs at least one trajectory and a batch_size >= 1, got {len(trajectories)} and batch_size={size!r}"
        )
    split = [list(trajectories[first : first + size]) for first in range(0, len(trajectories), size)]
    if rates is not None and len(rates) != len(split):
        raise ConfigError(
            f"train_sft: {len(rates)} learning rates for {len(split)} batches of {size}; pass one per batch"
        )
    yield from zip(split, rates or [config.learning_rate] * len(split), strict=True)


async def imitable(record: Record, trajectories: Sequence[Trajectory]) -> list[Imitable]:
    """Return the trajectories with the token ids of all assistant messages."""
    choices = [choice for trajectory in trajectories for choice in trajectory.choices()]
    recorded = await record.find(choices, strict=False)

    def calls_of(trajectory: Trajectory) -> Iterator[Call]:
        for tools, history in _histories(trajectory):
            yield from _calls(history, tools, recorded, record.run.model_folder)

    return [Imitable(task=None, calls=tuple(calls_of(trajectory))) for trajectory in trajectories]


def _histories(trajectory: Trajectory) -> Iterator[tuple[Tools | None, MessagesAndChoices]]:
    yield trajectory.tools, trajectory.messages_and_choices
    for history in trajectory.additional_histories:
        yield history.tools, history.messages_and_choices


def _calls(history: MessagesAndChoices, tools: Tools | None, recorded: dict[Key, Call], folder: str) -> Iterator[Call]:
    messages = messages_of(history)
    for index, item in enumerate(history):
        key = key_of(item) if isinstance(item, Choice) else None
        if key in recorded:
            yield recorded[key]
        elif messages[index].get("role") == "assistant":
            yield _renderer(folder).call(messages[:index], messages[index], tools=tools)


_renderer = functools.lru_cache(maxsize=1)(Renderer)
"""Cached, because ``train_sft`` needs it for every batch."""
