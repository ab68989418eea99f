"""Trajectories that nobody builds: every call of a coroutine to the trainable model. Knows nothing about training.

They are what the door recorded, so streams, several choices, threads and sync clients are all in them, and calls to other models
are not.
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

from openai.types.chat.chat_completion import Choice

from art_core.errors import ConfigError
from art_core.types import Call
from art_openpipe.record import marked
from art_openpipe.trajectories import History, Trajectory
from art_openpipe.types import Message, MessagesAndChoices

_current: ContextVar[Trajectory | None] = ContextVar("art_openpipe_trajectory", default=None)
_yielded: ContextVar[list[Trajectory] | None] = ContextVar("art_openpipe_yielded", default=None)


def auto_trajectory(*, required: bool = False) -> Trajectory | None:
    """Return the trajectory of the ``capture_auto_trajectory`` that this code runs in: for its reward, metrics and so on.

    Its messages are filled in when that ends. None where there is none, or with ``required`` a RuntimeError.
    """
    trajectory = _current.get()
    if trajectory is None and required:
        raise RuntimeError(
            "no trajectory is captured here: run this inside await art.capture_auto_trajectory(coroutine)"
        )
    return trajectory


async def capture_auto_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Run ``coroutine`` and return all that it asked the trainable model as a trajectory.

    What the coroutine returns is not looked at; it sets the reward by ``auto_trajectory()``. Where it raises, the exception has
    what was captured until then as its attribute ``trajectory``. Raises ConfigError where several trainable models are
    registered: ``art.langgraph.wrap_rollout(model, fn)`` says which one.
    """
    from art_openpipe.local.backend import all_opened

    opened = all_opened()
    if len(opened) != 1:
        coroutine.close()
        raise ConfigError(
            f"capture_auto_trajectory captures the calls to the one trainable model, and {len(opened)} are registered: await "
            "model.register(backend) first, or name one of several by art.langgraph.wrap_rollout(model, fn)"
        )
    trajectory = Trajectory()
    token = _current.set(trajectory)
    calls: list[Call] = []
    try:
        async with opened[0].record.scope(calls):
            await coroutine
    except Exception as error:
        fill(trajectory, calls)
        error.trajectory = trajectory  # type: ignore[attr-defined]  # TrajectoryGroup keeps it
        raise
    finally:
        _current.reset(token)
    fill(trajectory, calls)
    return trajectory


def fill(trajectory: Trajectory, calls: list[Call]) -> None:
    """Make conversations of calls: one that goes on where an earlier one ended belongs to it, another is a further history."""
    histories: list[tuple[MessagesAndChoices, Any]] = []
    for call in calls:
        asked, tools = list(call.request.get("messages", ())), call.request.get("tools")
        going_on = next((it for it, _ in reversed(histories) if _starts(it, asked)), None)
        if going_on is None:
            going_on = []
            histories.append((going_on, tools))
        going_on += [*asked[len(going_on) :], marked(call)]
    if histories:
        (trajectory.messages_and_choices, trajectory.tools), *others = histories
        trajectory.additional_histories = [History(messages_and_choices=it, tools=tools) for it, tools in others]


def _starts(history: MessagesAndChoices, asked: list[Message]) -> bool:
    """Whether ``asked`` goes on from ``history``: message by message the same, however a client writes an empty content."""
    return len(asked) > len(history) and all(
        _said(ours) == _said(theirs) for ours, theirs in zip(history, asked, strict=False)
    )


def _said(message: Message | Choice) -> Message:
    given = message.message.model_dump() if isinstance(message, Choice) else message
    calls = given.get("tool_calls") or ()
    functions = [(call.get("id"), call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return {"role": given.get("role"), "content": given.get("content") or "", "calls": functions}


def yield_trajectory(trajectory: Trajectory) -> None:
    """Hand a trajectory to the ``capture_yielded_trajectory`` that this code runs in."""
    holder = _yielded.get()
    if holder is None:
        raise RuntimeError("nobody captures here: run this inside await art.capture_yielded_trajectory(coroutine)")
    holder.append(trajectory)


async def capture_yielded_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Run ``coroutine`` and return the last trajectory that it yielded; RuntimeError where it yielded none."""
    holder: list[Trajectory] = []
    token = _yielded.set(holder)
    try:
        await coroutine
    finally:
        _yielded.reset(token)
    if not holder:
        raise RuntimeError("the coroutine yielded no trajectory: call art.yield_trajectory(trajectory) in it")
    return holder[-1]
