"""Trajectory and TrajectoryGroup as scripts build them. Knows nothing about models, tokens or training."""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, Field, PrivateAttr

from art_openpipe.gathering import Budget
from art_openpipe.types import Messages, MessagesAndChoices, Tools

MetadataValue = float | int | str | bool | None
_begun: ContextVar[list[Trajectory] | None] = ContextVar("art_openpipe_begun", default=None)
"""The trajectories that the rollout which runs here has made so far; None outside a group's rollouts."""


class PydanticException(BaseModel):
    """Why a rollout failed."""

    type: str
    message: str
    traceback: str
    trajectory: Trajectory | None = None
    """What the rollout had said until then, where it had made its trajectory."""


class History(BaseModel):
    """A further conversation of one run, such as a sub-agent's."""

    messages_and_choices: MessagesAndChoices
    tools: Tools | None = None

    def messages(self) -> Messages:
        return messages_of(self.messages_and_choices)


class Trajectory(BaseModel):
    """One run: what was said, and what it was worth."""

    messages_and_choices: MessagesAndChoices = []
    tools: Tools | None = None
    additional_histories: list[History] = []
    reward: float = 0.0
    initial_policy_version: int | None = None
    """Of the weights that answered the first choice; filled in when the trajectory is trained or logged."""
    final_policy_version: int | None = None
    metrics: dict[str, float | int | bool] = {}
    metadata: dict[str, MetadataValue] = {}
    logs: list[str] = []
    start_time: float = Field(default_factory=time.time)

    def model_post_init(self, context: Any) -> None:
        begun = _begun.get()
        if begun is not None:
            begun.append(self)

    def __str__(self) -> str:
        return f"Trajectory(reward={self.reward}, metrics={self.metrics}, metadata={self.metadata})"

    def log(self, message: str) -> None:
        """Keep a line with the trajectory."""
        self.logs.append(message)

    def finish(self) -> Trajectory:
        """Note how long the run took, as the metric ``duration``."""
        self.metrics["duration"] = time.time() - self.start_time
        return self

    @asynccontextmanager
    async def track_duration(self, name: str) -> AsyncIterator[None]:
        """Add the seconds of this block to the metric ``NAME_duration``, however it ends."""
        started = time.monotonic()
        try:
            yield
        finally:
            key = f"{name}_duration"
            self.metrics[key] = self.metrics.get(key, 0.0) + time.monotonic() - started

    def messages(self) -> Messages:
        """Return the conversation as messages that can be sent: every choice as what it said, tool calls and all."""
        return messages_of(self.messages_and_choices)

    def histories(self) -> list[MessagesAndChoices]:
        """Return the main conversation and the additional ones."""
        return [self.messages_and_choices, *(history.messages_and_choices for history in self.additional_histories)]

    def choices(self) -> list[Choice]:
        """Return the choices of all conversations, in order."""
        return [it for history in self.histories() for it in history if isinstance(it, Choice)]

    def for_logging(self) -> dict[str, Any]:
        """Return the trajectory as JSON has it; ``trainable`` marks what the model said."""
        messages = [
            {**message, "trainable": isinstance(given, Choice)}
            for message, given in zip(self.messages(), self.messages_and_choices, strict=True)
        ]
        kept = self.model_dump(include={"reward", "metrics", "metadata", "tools", "logs"})
        return {**kept, "messages": messages}


def messages_of(given: MessagesAndChoices) -> Messages:
    """Return messages and choices as messages."""
    return [it.message.model_dump(exclude_none=True, exclude=PARSED) if isinstance(it, Choice) else it for it in given]


PARSED = {"parsed": True, "tool_calls": {"__all__": {"function": {"parsed_arguments"}}}}
"""Fields of a client's own that no server knows."""


class TrajectoryGroup(BaseModel):
    """Runs of one task, to be compared with each other.

    Given awaitables, the group is awaited: ``await group``, or ``gather_trajectory_groups``. They run at the same time, and the
    trajectories stand in their order. Those that fail are ``exceptions``, where whoever gathers allows for it.
    """

    trajectories: list[Trajectory] = []
    exceptions: list[PydanticException] = []
    metadata: dict[str, MetadataValue] = {}
    metrics: dict[str, float | int | bool] = {}
    logs: list[str] = []
    _pending: list[Awaitable[Trajectory]] = PrivateAttr(default_factory=list)

    def __init__(
        self,
        trajectories: Iterable[Trajectory | BaseException | Awaitable[Trajectory]] = (),
        *,
        exceptions: Sequence[BaseException | PydanticException | Mapping[str, Any]] = (),
        metadata: Mapping[str, MetadataValue] | None = None,
        metrics: Mapping[str, float | int | bool] | None = None,
        logs: Sequence[str] | None = None,
    ) -> None:
        given = list(trajectories)
        failed = [it for it in given if isinstance(it, BaseException)]
        super().__init__(
            trajectories=[it for it in given if isinstance(it, Trajectory | dict)],
            exceptions=[_as_data(it) if isinstance(it, BaseException) else it for it in (*failed, *exceptions)],
            metadata=dict(metadata or {}),
            metrics=dict(metrics or {}),
            logs=list(logs or ()),
        )
        self._pending = [it for it in given if not isinstance(it, Trajectory | dict | BaseException)]

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]  # pydantic would yield fields
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __await__(self) -> Generator[Any, None, TrajectoryGroup]:
        return self._run().__await__()

    @property
    def awaited(self) -> int:
        """How many awaitables are still to be run."""
        return len(self._pending)

    def log(self, message: str) -> None:
        """Keep a line with the group."""
        self.logs.append(message)

    def close(self) -> None:
        """Leave what is pending undone."""
        for it in self._pending:
            if inspect.iscoroutine(it):
                it.close()
        self._pending = []

    async def _run(self) -> TrajectoryGroup:
        """Run what is pending; the first exception over the budget of whoever gathers ends the others and is raised."""
        budget = Budget.current()
        tasks = [asyncio.ensure_future(_run_one(it, budget)) for it in self._pending]
        self._pending = []
        try:
            for found in await asyncio.gather(*tasks):
                if isinstance(found, Trajectory):
                    self.trajectories.append(found)
                else:
                    self.exceptions.append(found)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self


async def _run_one(awaitable: Awaitable[Trajectory], budget: Budget) -> Trajectory | PydanticException:
    begun: list[Trajectory] = []
    _begun.set(begun)  # this task's own
    try:
        trajectory = await awaitable
        if not isinstance(trajectory, Trajectory):
            raise TypeError(
                f"a rollout returned {type(trajectory).__name__}, and a TrajectoryGroup holds art.Trajectory: return one"
            )
    except Exception as error:  # noqa: BLE001 - the boundary to the script's rollouts: their failures are data
        budget.failed(error)
        return _as_data(error, begun)
    budget.done(trajectory.reward, trajectory.metrics)
    return trajectory


def _as_data(error: BaseException, begun: Sequence[Trajectory] = ()) -> PydanticException:
    """Return an exception as data, with the longest of the trajectories that the failed rollout had begun."""
    partial = getattr(error, "trajectory", None)
    if not isinstance(partial, Trajectory):
        partial = max(begun, key=lambda it: len(it.choices()), default=None)
    text = "".join(traceback.format_exception(error))
    return PydanticException(type=type(error).__name__, message=str(error), traceback=text, trajectory=partial)


PydanticException.model_rebuild()
