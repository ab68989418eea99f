"""Rewards a rollout of the team: a mark for every node, or one number for all."""

from __future__ import annotations

from langchain_core.messages import ToolMessage, convert_to_messages

from art_core.types import Trajectory

from ..any_agent.inbox import reads


def per_node(trajectory: Trajectory) -> float:
    """Reward every node's calls with that node's own mark, if it could have done right.

    The rollout as a whole is always worth 0. So a call without a mark, such as opening a message when the right one was not
    shown, teaches nothing. ``metrics["success"]`` says how the rollout went.
    """
    for index, mark in enumerate(_marks(trajectory)):
        if mark is not None:
            trajectory.call_rewards[index] = mark
    return 0.0


def one_for_all(trajectory: Trajectory) -> float:
    """Return the share of the three marks that the rollout earned: the same information as one number for every call."""
    _marks(trajectory)
    return sum(trajectory.metrics[name] for name in ("found", "read", "success")) / 3


def _marks(trajectory: Trajectory) -> list[float | None]:
    """Return the mark of each call, 0 or 1, or None if it had no chance; add the metrics ``found``, ``read``, ``success``.

    A search is right if it shows the message with the answer, a reader if it opens that message once shown, a writer if it
    answers right once it is open. The nodes run one after another, so the n-th tool result belongs to the n-th call.
    """
    task = trajectory.task
    messages = convert_to_messages(trajectory.output["messages"]) if trajectory.output else []
    results = [message for message in messages if isinstance(message, ToolMessage)]
    found = read = success = False
    marks: list[float | None] = []
    for index, call in enumerate(trajectory.calls):
        result = results[index].text if index < len(results) else ""
        if call.made_by("searcher"):
            found = any(line.endswith(f" id {task['message_id']}") for line in result.splitlines())
            marks.append(float(found))
        elif call.made_by("reader"):
            read = any(reads(asked, task["message_id"]) for asked in call.response.get("tool_calls") or ())
            marks.append(float(read) if found else None)
        else:
            success = result.strip() == task["answer"]
            marks.append(float(success) if read else None)
    trajectory.metrics.update(found=float(found), read=float(read), success=float(success))
    return marks
