"""Trajectories to imitate -> art's, with token ids. Knows nothing about optimizers.

Choices of the model itself keep the ids that were sampled. What anybody else said has none: there, and only there, the model's
chat template says them.
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
"""Trajectories of one optimizer step where nobody says."""


def batches(
    trajectories: Sequence[Trajectory], config: TrainSFTConfig
) -> Iterator[tuple[list[Trajectory], float | None]]:
    """Yield each step's trajectories with its learning rate."""
    rates = config.learning_rate if isinstance(config.learning_rate, list) else None
    size = config.batch_size
    if size == "auto":
        size = max(1, -(-len(trajectories) // len(rates))) if rates else AUTO
    if not isinstance(size, int) or size < 1 or not trajectories:
        raise ConfigError(
            f"train_sft: {len(trajectories)} trajectories in batches of {size!r}; give at least one of each"
        )
    cut = [list(trajectories[first : first + size]) for first in range(0, len(trajectories), size)]
    if rates is not None and len(rates) != len(cut):
        raise ConfigError(
            f"train_sft: {len(rates)} learning rates for {len(cut)} batches of {size}; give one per batch"
        )
    yield from zip(cut, rates or [config.learning_rate] * len(cut), strict=True)


async def imitable(record: Record, trajectories: Sequence[Trajectory]) -> list[Imitable]:
    """Return the trajectories with the token ids of everything that the assistant says in them."""
    found = await record.find([choice for it in trajectories for choice in it.choices()], strict=False)
    return [
        Imitable(
            task=None,
            calls=tuple(
                call for tools, history in _histories(it) for call in _calls(history, tools, found, record.run.folder)
            ),
        )
        for it in trajectories
    ]


def _histories(trajectory: Trajectory) -> Iterator[tuple[Tools | None, MessagesAndChoices]]:
    yield trajectory.tools, trajectory.messages_and_choices
    for history in trajectory.additional_histories:
        yield history.tools, history.messages_and_choices


def _calls(history: MessagesAndChoices, tools: Tools | None, recorded: dict[Key, Call], folder: str) -> Iterator[Call]:
    messages = messages_of(history)
    for place, given in enumerate(history):
        key = key_of(given) if isinstance(given, Choice) else None
        if key in recorded:
            yield recorded[key]
        elif messages[place].get("role") == "assistant":
            yield _renderer(folder).call(messages[:place], messages[place], tools=tools)


_renderer = functools.lru_cache(maxsize=1)(Renderer)
"""That of a model folder: ``train_sft`` asks for it at every batch."""
