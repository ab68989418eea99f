"""Rewards a rollout by the known answer."""

from __future__ import annotations

from langchain_core.messages import AIMessage, BaseMessage, ToolMessage, convert_to_messages

from art_core.types import Trajectory

from .tasks import MAX_MODEL_CALLS


def reward(trajectory: Trajectory) -> float:
    """Return 1 for the right answer, plus 0.1 for reading the right message, minus 0.1 each for a malformed call and for
    no answer.

    Adds the metrics ``success``, ``found`` (a search showed the right message), ``read`` and ``malformed``, each 0 or 1.
    """
    task = trajectory.task
    messages = convert_to_messages(trajectory.output["messages"]) if trajectory.output else []
    answer = _answer(messages)
    success = answer is not None and answer.strip() == task["answer"]
    read = _read(messages, task["message_id"])
    malformed = _malformed(messages)
    trajectory.metrics.update(
        success=float(success),
        found=float(_found(messages, task["message_id"])),
        read=float(read),
        malformed=float(malformed),
    )
    return 1.0 * success + 0.1 * read - 0.1 * malformed - 0.1 * (answer is None)


def _answer(messages: list[BaseMessage]) -> str | None:
    for message in messages:
        if isinstance(message, ToolMessage) and message.name == "return_final_answer" and message.status == "success":
            return message.text
    return None


def _found(messages: list[BaseMessage], message_id: int) -> bool:
    results = [m.text for m in messages if isinstance(m, ToolMessage) and m.name == "search_inbox"]
    return any(line.endswith(f" id {message_id}") for text in results for line in text.splitlines())


def _read(messages: list[BaseMessage], message_id: int) -> bool:
    calls = [call for m in messages if isinstance(m, AIMessage) for call in m.tool_calls]
    return any(call["name"] == "read_email" and str(call["args"].get("id")) == str(message_id) for call in calls)


def _malformed(messages: list[BaseMessage]) -> bool:
    # At the call limit the agent adds an answer of its own after the model's.
    replies = [m for m in messages if isinstance(m, AIMessage)][:MAX_MODEL_CALLS]
    refused = any(isinstance(m, ToolMessage) and m.status == "error" for m in messages)
    return refused or any(not reply.tool_calls for reply in replies)
