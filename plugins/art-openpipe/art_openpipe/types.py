"""The small types of OpenPipe ART's API."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, BeforeValidator, ConfigDict

Message = dict[str, Any]
"""A chat message in OpenAI's form."""
Messages = list[Message]


def _normalized(item: Any) -> Any:
    """Convert a choice stored as JSON back to a ``Choice``, and a client's message object to a dict."""
    if isinstance(item, dict):
        return Choice.model_validate(item) if "message" in item and "role" not in item else item
    return item.model_dump(exclude_none=True) if isinstance(item, BaseModel) and not isinstance(item, Choice) else item


MessagesAndChoices = list[Annotated[Message | Choice, BeforeValidator(_normalized)]]
"""A rollout's conversation: messages as dicts, and the model's own answers as choices."""
Tools = list[dict[str, Any]]


class TrainConfig(BaseModel):
    """Configuration of ``model.train``. None: art's default for the model's size."""

    model_config = ConfigDict(extra="allow")  # unknown fields are refused later, by name and with a reason

    learning_rate: float | None = None


class TrainSFTConfig(BaseModel):
    """Configuration of ``model.train_sft``."""

    model_config = ConfigDict(extra="forbid")

    learning_rate: float | list[float] | None = None
    """A list has one rate per batch."""
    batch_size: int | str = "auto"
    """Trajectories per optimizer step; ``"auto"``: 2, or as many as a list of learning rates implies."""


@dataclass
class TrainResult:
    """Result of a training step."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class LocalTrainResult(TrainResult):
    """Result of a training step on this machine."""

    checkpoint_path: str | None = None


class Backend(Protocol):
    """Trains models; the only one is ``LocalBackend``."""

    async def register(self, model: Any) -> None: ...

    async def train(self, model: Any, trajectory_groups: Any, **settings: Any) -> TrainResult: ...

    async def close(self) -> None: ...


def folder_of(base: str | Path, project: str, name: str) -> Path:
    """Return a model's folder below the backend's path."""
    return Path(base) / project / "models" / name
