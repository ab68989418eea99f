"""OpenPipe ART's Trajectory and TrajectoryGroup, as scripts build or capture them.

The server that records a call is told, as its agent's name, in which ``with`` block it was made, by whatever client or thread.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Coroutine, Generator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from logging import getLogger
from typing import Any

from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from art_core.errors import ConfigError
from art_core.plugin_api import inside_rollout
from art_openpipe.gather import Budget
from art_openpipe.histories import (
    ChatCompletionsExchange,
    ChatCompletionsHistory,
    LegacyHistory,
    Recorded,
    TrajectoryExchanges,
    messages_of,
)
from art_openpipe.record import AGENT, current_scope, records, scopes
from art_openpipe.tokens import TokenFlag as TokenFlag
from art_openpipe.types import Messages, MessagesAndChoices, Tools

_yielded: ContextVar[list[Trajectory] | None] = ContextVar("art_openpipe_yielded", default=None)


class Scope:
    """One ``with`` block of a trajectory."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.name = AGENT + uuid.uuid4().hex
        self.trajectory = trajectory
        self.noted = list(trajectory.exchanges.chat_completions)  # from before, and with prompted models
        self._starts = {record: record.last() for record in list(records)}
        self._stack = ExitStack()
        for record in self._starts:
            self._stack.enter_context(inside_rollout(record.address()))
        scopes.set((*scopes.get(), self))

    def leave(self) -> None:
        """Stop capturing."""
        if current_scope() is not self:
            raise RuntimeError("the blocks of trajectories must end in reverse order, each in its own task")
        scopes.set(scopes.get()[:-1])
        self._stack.close()
        self.read()

    def __deepcopy__(self, memo: Any) -> None:
        """Copies of a trajectory do not capture."""

    def read(self) -> None:
        """Update the trajectory's exchanges, unless the script builds the messages itself, or has closed a backend."""
        fields = vars(self.trajectory)
        own = fields["messages_and_choices"] or fields["additional_histories"] or fields["tools"]
        if not own and self._starts.keys() <= set(records):
            found = [each for record, start in self._starts.items() for each in record.exchanges(self.name, start)]
            recorded = map(ChatCompletionsExchange.model_validate, found)
            fields["exchanges"].chat_completions[:] = [*self.noted, *recorded]


def current_trajectory(*, require: bool = False) -> Trajectory | None:
    """Return the trajectory that captures here; outside of one None or, with ``require``, a RuntimeError."""
    scope = current_scope()
    if require and scope is None:
        raise RuntimeError("no trajectory captures here; run this in 'with art.Trajectory()' or art.trajectory(...)")
    return scope and scope.trajectory


@contextmanager
def no_capture() -> Iterator[None]:
    """Leave the calls of this block out of the trajectories around it; it may contain blocks of its own."""
    token = scopes.set(())
    try:
        yield
    finally:
        scopes.reset(token)


class PydanticException(BaseModel):
    """Why a rollout failed."""

    type: str
    message: str
    traceback: str


class Trajectory(Recorded, BaseModel):
    """One rollout: its messages or its exchanges, its reward and its metrics.

    ``with Trajectory() as trajectory`` captures the block's calls to models of this package as ``exchanges``.
    """

    model_config = ConfigDict(extra="allow")

    exchanges: TrajectoryExchanges = Field(default_factory=TrajectoryExchanges)
    messages_and_choices: MessagesAndChoices = []
    tools: Tools | None = None
    additional_histories: list[LegacyHistory] = []
    reward: float = 0.0
    initial_policy_version: int | None = None  # the lowest that answered; set when the trajectory is trained or logged
    final_policy_version: int | None = None
    metrics: dict[str, float | int | bool] = {}
    metadata: dict[str, Any] = {}
    logs: list[str] = []
    start_time: datetime = Field(default_factory=lambda: datetime.now(UTC), exclude=True)
    _scope: Scope | None = PrivateAttr(default=None)  # of the with block that is capturing

    @model_validator(mode="after")
    def _one_form(self) -> Trajectory:
        if self.model_extra:
            getLogger("art_openpipe").warning("Trajectory keeps %s, but does not use it", ", ".join(self.model_extra))
        if self.exchanges and (self.messages_and_choices or self.additional_histories or self.tools is not None):
            raise ValueError("a trajectory has either exchanges or messages_and_choices, tools, additional_histories")
        return self

    def __getattribute__(self, name: str) -> Any:
        if name == "exchanges" and (capturing := self._scope) is not None:
            capturing.read()
        return super().__getattribute__(name)

    def __enter__(self) -> Trajectory:
        self._scope = Scope(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._scope.leave()
        self._scope = None
        self.finish()

    def finish(self) -> Trajectory:
        """Set the metric ``duration`` to the seconds since ``start_time``."""
        self.metrics["duration"] = (datetime.now(UTC) - self.start_time).total_seconds()
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

    def histories(self, *, model: str | None = None, **others: Any) -> list[LegacyHistory | ChatCompletionsHistory]:
        """Return the conversations: those that were captured, with ``model`` if it is given, or else the script's own."""
        for name in others:
            raise ConfigError(f"histories: {name} is not supported by art, which joins calls by their text; remove it")
        if self.exchanges:
            return list(self.exchanges.histories(model))
        main = LegacyHistory(messages_and_choices=self.messages_and_choices, tools=self.tools)
        return [main, *self.additional_histories]

    def history(self, **options: Any) -> LegacyHistory:
        """Return the only conversation; ValueError if there is another number of them."""
        histories = self.histories(**options)
        if len(histories) != 1:
            raise ValueError(f"the trajectory has {len(histories)} histories, not one; use histories()")
        return histories[0]

    chat_completions_histories, chat_completions_history = histories, history

    def messages(self) -> Messages:
        """Return the conversation as messages for a request, with choices converted, tool calls included."""
        return messages_of(self.history().messages_and_choices if self.exchanges else self.messages_and_choices)

    def choices(self, model: str | None = None) -> list[Choice]:
        """Return the choices of all conversations, in order; ``model`` leaves out captured ones with others."""
        if self.exchanges:
            return self.exchanges.choices(model)
        return [choice for history in self.histories() for choice in history.choices()]

    def for_logging(self) -> dict[str, Any]:
        """Return the trajectory as JSON values; ``trainable`` marks the model's own messages."""
        if self.exchanges:
            return self.model_dump(mode="json")
        pairs = zip(self.messages(), self.messages_and_choices, strict=True)
        messages = [{**message, "trainable": isinstance(item, Choice)} for message, item in pairs]
        fields = self.model_dump(exclude={"exchanges", "messages_and_choices", "additional_histories"})
        return {**fields, "messages": messages}


class TrajectoryGroup(Recorded, BaseModel):
    """Rollouts of one task, to be compared with each other.

    If created from awaitables, await the group itself or pass it to ``gather_trajectory_groups``: they run concurrently.
    Failures become ``exceptions``, as far as ``max_exceptions`` allows.
    """

    model_config = ConfigDict(extra="forbid")

    trajectories: list[Trajectory] = []
    exceptions: list[PydanticException] = []
    metadata: dict[str, Any] = {}
    metrics: dict[str, float | int | bool] = {}
    logs: list[str] = []
    _pending: list[Any] = PrivateAttr(default_factory=list)  # what it was created from, while some of it has not run

    def __init__(self, trajectories: Iterable[Any] = (), *, exceptions: Iterable[Any] = (), **fields: Any) -> None:
        items = list(trajectories)
        failures = [*(item for item in items if isinstance(item, BaseException)), *exceptions]
        super().__init__(
            trajectories=[item for item in items if isinstance(item, Trajectory | dict)],
            exceptions=[_as_data(error) if isinstance(error, BaseException) else error for error in failures],
            **{name: value for name, value in fields.items() if value is not None},
        )
        if any(map(_runs, items)):
            self._pending = [item for item in items if not isinstance(item, BaseException)]

    def __iter__(self) -> Iterator[Trajectory]:  # type: ignore[override]  # pydantic would yield fields
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __await__(self) -> Generator[Any, None, TrajectoryGroup]:
        return self._run(Budget.current()).__await__()

    @property
    def awaited(self) -> int:
        """Number of awaitables that have not run yet."""
        return sum(map(_runs, self._pending))

    def close(self) -> None:
        """Drop the awaitables that have not run yet."""
        for pending in filter(inspect.iscoroutine, self._pending):
            pending.close()
        self._pending = []

    async def _run(self, budget: Budget) -> TrajectoryGroup:
        """Run the pending awaitables; the first exception beyond the budget cancels the others and is raised."""
        items, self._pending = self._pending, []
        tasks = {id(item): asyncio.ensure_future(_run_one(item, budget)) for item in items if _runs(item)}
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        results = [tasks[id(item)].result() if _runs(item) else item for item in items]
        if results:
            self.trajectories = [result for result in results if isinstance(result, Trajectory)]
            self.exceptions += [result for result in results if isinstance(result, PydanticException)]
        return self


async def trajectory_group(
    trajectories: Iterable[Any], *, return_exceptions: bool = False, **fields: Any
) -> TrajectoryGroup:
    """Run the awaitables concurrently and return the group; the first failure is raised unless ``return_exceptions``."""
    group = TrajectoryGroup(trajectories, **fields)
    with no_capture():
        return await group._run(Budget(allowed=float("inf") if return_exceptions else 0))


def _runs(item: Any) -> bool:
    return not isinstance(item, Trajectory | dict | BaseException)


async def _run_one(awaitable: Awaitable[Trajectory], budget: Budget) -> Trajectory | PydanticException:
    try:
        result = await awaitable
        if not isinstance(result, Trajectory):
            raise TypeError(f"a rollout of a TrajectoryGroup returned {type(result).__name__}, not an art.Trajectory")
    except Exception as error:  # noqa: BLE001 - failures of the script's rollouts are data
        budget.failed(error)
        return _as_data(error)
    budget.done(result.reward, result.metrics)
    return result


def _as_data(error: BaseException) -> PydanticException:
    text = "".join(traceback.format_exception(error))
    return PydanticException(type=type(error).__name__, message=str(error), traceback=text)


async def trajectory(coroutine: Coroutine[Any, Any, object]) -> Trajectory:
    """Run ``coroutine`` and return its calls as a trajectory. It sets the reward through ``current_trajectory()``."""
    if not asyncio.iscoroutine(coroutine):
        raise TypeError(f"art.trajectory runs a coroutine, got {type(coroutine).__name__}")
    with Trajectory() as captured:
        await coroutine
    return captured


def yield_trajectory(trajectory: Trajectory) -> None:
    """Pass a trajectory to the enclosing ``capture_yielded_trajectory``; RuntimeError outside of one."""
    holder = _yielded.get()
    if holder is None:
        raise RuntimeError("no capture is active here; run this inside await art.capture_yielded_trajectory(coroutine)")
    holder.append(trajectory)


async def capture_yielded_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Run ``coroutine`` and return the last trajectory that it yielded; RuntimeError if it yielded none."""
    holder: list[Trajectory] = []
    token = _yielded.set(holder)
    try:
        await coroutine
    finally:
        _yielded.reset(token)
    if not holder:
        raise RuntimeError("the coroutine yielded no trajectory; call art.yield_trajectory(trajectory) in it")
    return holder[-1]
