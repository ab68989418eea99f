"""A run of the team -> a mark for every node, or one number for all. Knows nothing about models or training."""

from __future__ import annotations

from langchain_core.messages import ToolMessage, convert_to_messages

from art_core.types import Trajectory


def per_node(trajectory: Trajectory) -> float:
    """Reward every node's calls by that node's own mark, and only where it could have done right.

    The run as a whole is worth 0, always: so a call without a mark, such as opening a message where the right one was not
    shown, teaches nothing. ``metrics["success"]`` says how the run went.
    """
    for index, mark in enumerate(_marks(trajectory)):
        if mark is not None:
            trajectory.call_rewards[index] = mark
    return 0.0


def one_for_all(trajectory: Trajectory) -> float:
    """Return the share of the three marks that the run earned: the same information, the same number for every call."""
    _marks(trajectory)
    return sum(trajectory.metrics[name] for name in ("found", "read", "success")) / 3


def _marks(trajectory: Trajectory) -> list[float | None]:
    """Return what each call is worth by itself, 0 or 1, None where it had no chance; measure ``found``, ``read``, ``success``.

    A search is right that shows the message that has the answer; so is opening it where it was shown, and saying what was
    asked for where it was opened. The nodes work one after another, so the n-th tool result is of the n-th call.
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
            arguments = str(call.response.get("tool_calls"))
            read = str(task["message_id"]) in arguments
            marks.append(float(read) if found else None)
        else:
            success = result.strip() == task["answer"]
            marks.append(float(success) if read else None)
    trajectory.metrics.update(found=float(found), read=float(read), success=float(success))
    return marks
