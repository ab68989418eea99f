"""A plain function that uses the OpenAI client: a loop over tool calls, as its users write it.

It doesn't mention art. The client is created at import, with its own base URL.
"""

from __future__ import annotations

from openai import OpenAI

from ..email_search.tasks import MAX_MODEL_CALLS, SYSTEM_PROMPT
from .inbox import ANSWER, TOOLS, Json, use_tool

client = OpenAI(api_key="unused: the policy answers", base_url="https://api.openai.com/v1")


def agent(task: Json) -> str | None:
    """Answer ``task["question"]`` from ``task["mailbox"]``."""
    messages: list[Json] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": task["question"]},
    ]
    for _ in range(MAX_MODEL_CALLS):
        reply = client.chat.completions.create(
            model="gpt-6-luna", messages=messages, tools=TOOLS, reasoning_effort="none", temperature=0
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return None
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = use_tool(call.function.name, call.function.arguments, task["mailbox"])
            if call.function.name == ANSWER:
                return result
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None
