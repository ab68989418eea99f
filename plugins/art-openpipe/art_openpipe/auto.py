"""Trajectories that are built automatically from a coroutine's calls to the trainable model.

They consist of the calls that the capture server recorded, so they include streams, multiple choices, threads and sync clients,
but no calls to other models.
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
    """Return the trajectory of the enclosing ``capture_auto_trajectory``, for setting its reward, metrics and so on.

    Its messages are added at the end. Outside of one, returns None or, with ``required``, raises RuntimeError.
    """
    trajectory = _current.get()
    if trajectory is None and required:
        raise RuntimeError(
            "no trajectory is being captured here; run this inside await art.capture_auto_trajectory(coroutine)"
        )
    return trajectory


async def capture_auto_trajectory(coroutine: Coroutine[Any, Any, Any]) -> Trajectory:
    """Run ``coroutine`` and return its calls to the trainable model as a trajectory.

    The coroutine's result is ignored; it sets the reward through ``auto_trajectory()``. If it raises, the exception's attribute
    ``trajectory`` has the calls up to then. Raises ConfigError unless exactly one trainable model is registered; with several,
    use ``art.langgraph.wrap_rollout(model, fn)``.
    """
    from art_openpipe.local.backend import all_opened

    opened = all_opened()
    if len(opened) != 1:
        coroutine.close()
        raise ConfigError(
            f"capture_auto_trajectory needs exactly one trainable model, but {len(opened)} are registered: await "
            "model.register(backend) first, or choose one of several with art.langgraph.wrap_rollout(model, fn)"
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
    """Group calls into conversations: a call that continues an earlier conversation extends it, any other starts a new
    history."""
    histories: list[tuple[MessagesAndChoices, Any]] = []
    for call in calls:
        prompt, tools = list(call.request.get("messages", ())), call.request.get("tools")
        history = next((history for history, _ in reversed(histories) if _continues(history, prompt)), None)
        if history is None:
            history = []
            histories.append((history, tools))
        history += [*prompt[len(history) :], marked(call)]
    if histories:
        (trajectory.messages_and_choices, trajectory.tools), *others = histories
        trajectory.additional_histories = [
            History(messages_and_choices=history, tools=tools) for history, tools in others
        ]


def _continues(history: MessagesAndChoices, prompt: list[Message]) -> bool:
    """Whether ``prompt`` starts with all messages of ``history``, however a client writes empty content."""
    return len(prompt) > len(history) and all(
        _comparable(ours) == _comparable(theirs) for ours, theirs in zip(history, prompt, strict=False)
    )


def _comparable(item: Message | Choice) -> Message:
    message = item.message.model_dump() if isinstance(item, Choice) else item
    calls = message.get("tool_calls") or ()
    functions = [(call.get("id"), call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return {"role": message.get("role"), "content": message.get("content") or "", "calls": functions}


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
