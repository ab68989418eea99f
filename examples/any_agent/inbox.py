"""Questions about the mailboxes of ``examples/email_search``, three tools in OpenAI's form, and a reward.

Every agent in this folder receives a task's input and returns the answer as text, or None.
"""

from __future__ import annotations

import json
from typing import Any

from art_core.types import Trajectory

from ..email_search.mailbox import format_message, format_results, open_mailbox
from ..email_search.tasks import held_out_tasks, training_tasks

ANSWER = "return_final_answer"

Json = dict[str, Any]


def questions(n: int, seed: int = 0, *, held_out: bool = False) -> list[Json]:
    """Return ``n`` tasks: ``{"input": {"question": str, "mailbox": int}, "answer": str, "message_id": int}``."""
    drawn = (held_out_tasks if held_out else training_tasks)(n, seed)
    return [{**task, "input": _question(**task["input"])} for task in drawn]


def _question(messages: list[Json], mailbox: int) -> Json:
    return {"question": messages[0]["content"], "mailbox": mailbox}


def tool(name: str, description: str, required: str, **properties: Json) -> Json:
    """Return a tool in the form of OpenAI's API."""
    parameters = {"properties": properties, "required": [required], "type": "object"}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TEXT = {"default": "", "type": "string"}
TOOLS = [
    tool(
        "search_inbox",
        "Search emails.",
        "keywords",
        keywords={"items": {"type": "string"}, "type": "array"},
        sender=TEXT,
        sent_after=TEXT,
        sent_before=TEXT,
    ),
    tool("read_email", "Read one email.", "id", id={"type": "integer"}),
    tool(ANSWER, "Answer the user.", "answer", answer={"type": "string"}),
]


def use_tool(name: str, arguments: str | Json, mailbox: int) -> str:
    """Call a tool with a model's arguments, as JSON text or parsed, and return its answer; the model sees errors as text."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        if name == "search_inbox":
            return format_results(open_mailbox(mailbox).search(**parsed))
        if name == "read_email":
            return format_message(open_mailbox(mailbox).read(int(parsed["id"])))
        return str(parsed["answer"]) if name == ANSWER else f"there is no tool {name}"
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return f"Error: {error}"


def reads(call: Json, message_id: int) -> bool:
    """Return whether a tool call reads this message."""
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        return False
    is_read = call["function"]["name"] == "read_email" and isinstance(arguments, dict)
    return is_read and str(arguments.get("id")) == str(message_id)


def reward(trajectory: Trajectory) -> float:
    """Return 1 for the right answer, plus 0.1 for reading the right message, minus 0.1 for no answer."""
    success = (trajectory.output or "").strip() == trajectory.task["answer"]
    read = any(
        reads(call, trajectory.task["message_id"])
        for recorded in trajectory.calls
        for call in recorded.response.get("tool_calls") or ()
    )
    trajectory.metrics.update(success=float(success), read=float(read))
    return success + 0.1 * read - 0.1 * (trajectory.output is None)
