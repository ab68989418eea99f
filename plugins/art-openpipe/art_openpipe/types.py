"""The small types of OpenPipe ART's API."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, BeforeValidator, ConfigDict

Message = dict[str, Any]  # in OpenAI's form
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
    """Arguments of ``backend.train``: ``await backend.train(model, groups, **config.model_dump(exclude_unset=True))``."""

    model_config = ConfigDict(extra="allow")  # train refuses unknown ones, by name and with a reason

    learning_rate: float | None = None


class TrainSFTConfig(BaseModel):
    """Configuration of ``model.train_sft``."""

    model_config = ConfigDict(extra="forbid")

    learning_rate: float | list[float] | None = None  # a list: one per batch; None: art's default for the model's size
    batch_size: int | Literal["auto"] = "auto"
    """Trajectories per optimizer step; ``"auto"``: 2, or as many as a list of learning rates implies."""
    assistant_turns: Literal["all", "last"] = "all"  # which answers of a conversation are imitated


@dataclass
class TrainResult:
    """Result of a training step."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class LocalTrainResult(TrainResult):
    """Result of a training step on this machine; a checkpoint is on disk when it returns."""

    checkpoint_path: str | None = None
    checkpoint_ready: None = None


ServerlessTrainResult = TrainResult  # for annotations


class LocalServingUnavailableError(RuntimeError):
    """The model's address can't be reached, so every further rollout would fail; no gathering tolerates it."""


def folder_of(base: str | Path, project: str, name: str) -> Path:
    """Return a model's folder below the backend's path."""
    return Path(base) / project / "models" / name
