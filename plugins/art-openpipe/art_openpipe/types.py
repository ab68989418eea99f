"""The small nouns of OpenPipe ART's API. Knows nothing about how they are used."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, BeforeValidator, ConfigDict

Message = dict[str, Any]
"""A chat message as OpenAI has it."""
Messages = list[Message]


def _one(given: Any) -> Any:
    """Take a choice that was kept as JSON for a choice again, and a message of a client's own class as a dict."""
    if isinstance(given, dict):
        return Choice.model_validate(given) if "message" in given and "role" not in given else given
    return (
        given.model_dump(exclude_none=True) if isinstance(given, BaseModel) and not isinstance(given, Choice) else given
    )


MessagesAndChoices = list[Annotated[Message | Choice, BeforeValidator(_one)]]
"""What a run saw and said: messages as dicts, what the model said as the choices that it answered."""
Tools = list[dict[str, Any]]


class TrainConfig(BaseModel):
    """Of ``model.train``. None: art's own default, which goes by the model's size."""

    model_config = ConfigDict(extra="allow")  # what is not known is refused with a reason, by name

    learning_rate: float | None = None


class TrainSFTConfig(BaseModel):
    """Of ``model.train_sft``."""

    model_config = ConfigDict(extra="forbid")

    learning_rate: float | list[float] | None = None
    """A list has one rate per batch."""
    batch_size: int | str = "auto"
    """Trajectories of one optimizer step; ``"auto"`` takes 2, or as many as there are rates for."""


@dataclass
class TrainResult:
    """What a training step did."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class LocalTrainResult(TrainResult):
    """What a training step on this machine did."""

    checkpoint_path: str | None = None


class Backend(Protocol):
    """Where models are trained: ``LocalBackend`` is the one that there is."""

    async def register(self, model: Any) -> None: ...

    async def train(self, model: Any, trajectory_groups: Any, **settings: Any) -> TrainResult: ...

    async def close(self) -> None: ...


def folder_of(base: str | Path, project: str, name: str) -> Path:
    """Return where a model's files are, below the backend's own path."""
    return Path(base) / project / "models" / name
