"""OpenPipe ART's Trajectory and TrajectoryGroup, as scripts build them."""

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
_created: ContextVar[list[Trajectory] | None] = ContextVar("art_openpipe_created", default=None)
"""The trajectories that the current rollout has created so far; None outside a group's rollouts."""


class PydanticException(BaseModel):
    """Why a rollout failed."""

    type: str
    message: str
    traceback: str
    trajectory: Trajectory | None = None
    """The rollout's unfinished trajectory, if it had created one."""


class History(BaseModel):
    """An additional conversation of a rollout, such as a sub-agent's."""

    messages_and_choices: MessagesAndChoices
    tools: Tools | None = None

    def messages(self) -> Messages:
        return messages_of(self.messages_and_choices)


class Trajectory(BaseModel):
    """One rollout: its messages, its reward and its metrics."""

    messages_and_choices: MessagesAndChoices = []
    tools: Tools | None = None
    additional_histories: list[History] = []
    reward: float = 0.0
    initial_policy_version: int | None = None
    """Lowest version of the weights that answered; set when the trajectory is trained or logged."""
    final_policy_version: int | None = None
    metrics: dict[str, float | int | bool] = {}
    metadata: dict[str, MetadataValue] = {}
    logs: list[str] = []
    start_time: float = Field(default_factory=time.time)

    def model_post_init(self, context: Any) -> None:
        created = _created.get()
        if created is not None:
            created.append(self)

    def __str__(self) -> str:
        return f"Trajectory(reward={self.reward}, metrics={self.metrics}, metadata={self.metadata})"

    def log(self, message: str) -> None:
        """Add a line to the trajectory's logs."""
        self.logs.append(message)

    def finish(self) -> Trajectory:
        """Set the metric ``duration`` to the seconds since ``start_time``."""
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
        """Return the conversation as messages for a request, with choices converted, tool calls included."""
        return messages_of(self.messages_and_choices)

    def histories(self) -> list[MessagesAndChoices]:
        """Return the main conversation and the additional ones."""
        return [self.messages_and_choices, *(history.messages_and_choices for history in self.additional_histories)]

    def choices(self) -> list[Choice]:
        """Return the choices of all conversations, in order."""
        return [item for history in self.histories() for item in history if isinstance(item, Choice)]

    def for_logging(self) -> dict[str, Any]:
        """Return the trajectory as JSON values; ``trainable`` marks the model's own messages."""
        messages = [
            {**message, "trainable": isinstance(item, Choice)}
            for message, item in zip(self.messages(), self.messages_and_choices, strict=True)
        ]
        fields = self.model_dump(include={"reward", "metrics", "metadata", "tools", "logs"})
        return {**fields, "messages": messages}


def messages_of(history: MessagesAndChoices) -> Messages:
    """Return messages and choices as messages."""
    return [
        item.message.model_dump(exclude_none=True, exclude=PARSED) if isinstance(item, Choice) else item
        for item in history
    ]


PARSED = {"parsed": True, "tool_calls": {"__all__": {"function": {"parsed_arguments"}}}}
"""Fields that a client adds and servers do not accept."""


class TrajectoryGroup(BaseModel):
    """Rollouts of one task, to be compared with each other.

    If created from awaitables, await the group itself or pass it to ``gather_trajectory_groups``: they run concurrently, and
    their trajectories keep their order. Failures become ``exceptions``, as far as ``max_exceptions`` allows.
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
        items = list(trajectories)
        failures = [*(item for item in items if isinstance(item, BaseException)), *exceptions]
        super().__init__(
            trajectories=[item for item in items if isinstance(item, Trajectory | dict)],
            exceptions=[_as_data(error) if isinstance(error, BaseException) else error for error in failures],
            metadata=dict(metadata or {}),
            metrics=dict(metrics or {}),
            logs=list(logs or ()),
        )
        self._pending = [item for item in items if not isinstance(item, Trajectory | dict | BaseException)]

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]  # pydantic would yield fields
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __await__(self) -> Generator[Any, None, TrajectoryGroup]:
        return self._run().__await__()

    @property
    def awaited(self) -> int:
        """Number of awaitables that have not run yet."""
        return len(self._pending)

    def log(self, message: str) -> None:
        """Add a line to the group's logs."""
        self.logs.append(message)

    def close(self) -> None:
        """Drop the awaitables that have not run yet."""
        for pending in self._pending:
            if inspect.iscoroutine(pending):
                pending.close()
        self._pending = []

    async def _run(self) -> TrajectoryGroup:
        """Run the pending awaitables; the first exception beyond the current budget cancels the others and is raised."""
        budget = Budget.current()
        tasks = [asyncio.ensure_future(_run_one(pending, budget)) for pending in self._pending]
        self._pending = []
        try:
            for result in await asyncio.gather(*tasks):
                if isinstance(result, Trajectory):
                    self.trajectories.append(result)
                else:
                    self.exceptions.append(result)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self


async def _run_one(awaitable: Awaitable[Trajectory], budget: Budget) -> Trajectory | PydanticException:
    created: list[Trajectory] = []
    _created.set(created)  # affects this task only
    try:
        trajectory = await awaitable
        if not isinstance(trajectory, Trajectory):
            raise TypeError(
                f"a rollout returned {type(trajectory).__name__}; a rollout of a TrajectoryGroup must return an art.Trajectory"
            )
    except Exception as error:  # noqa: BLE001 - failures of the script's rollouts are data
        budget.failed(error)
        return _as_data(error, created)
    budget.done(trajectory.reward, trajectory.metrics)
    return trajectory


def _as_data(error: BaseException, created: Sequence[Trajectory] = ()) -> PydanticException:
    """Return an exception as data, with the longest trajectory that the failed rollout had created."""
    partial = getattr(error, "trajectory", None)
    if not isinstance(partial, Trajectory):
        partial = max(created, key=lambda trajectory: len(trajectory.choices()), default=None)
    text = "".join(traceback.format_exception(error))
    return PydanticException(type=type(error).__name__, message=str(error), traceback=text, trajectory=partial)


PydanticException.model_rebuild()
