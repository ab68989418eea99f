"""An agent in production: it turns a question into keywords for a search."""

import json

from openai import OpenAI

KEYWORDS = {
    "type": "object",
    "properties": {"keywords": {"type": "array", "items": {"type": "string"}}},
    "required": ["keywords"],
}
SEARCH = {
    "type": "function",
    "function": {"name": "search_inbox", "description": "Search emails.", "parameters": KEYWORDS},
}
client = OpenAI()  # OPENAI_BASE_URL and OPENAI_API_KEY say which provider


def agent(question):
    messages = [
        {"role": "system", "content": "You answer questions about an inbox."},
        {"role": "user", "content": question},
    ]
    reply = client.chat.completions.create(
        model="gpt-6-luna", messages=messages, tools=[SEARCH], reasoning_effort="none", max_completion_tokens=40
    )
    calls = reply.choices[0].message.tool_calls
    return json.loads(calls[0].function.arguments)["keywords"] if calls else []


def reward(trajectory):
    """Every word that a search needs, and no other: the last two of the question."""
    wanted, chosen = set(trajectory.task["input"].rstrip("?").split()[-2:]), set(trajectory.output or [])
    trajectory.metrics["success"] = float(chosen == wanted)
    return len(wanted & chosen) / len(wanted | chosen)
