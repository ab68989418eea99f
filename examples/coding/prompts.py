"""What the agent says to the model, and how it reads the answer. Knows nothing about tasks' tests or about training."""

from __future__ import annotations

import re
from typing import Any

SYSTEM_PROMPT = "You write Python functions. Answer with the code only."


def opening(request: str) -> list[dict[str, Any]]:
    """Return the messages that a conversation begins with."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": request}]


def complaint(arguments: list[Any], happened: str, expected: Any) -> str:
    """Return what the model is told of an example that failed."""
    return f"f({', '.join(map(repr, arguments))}) {happened}, not {expected!r}. Try again."


def code_of(answer: str | None) -> str:
    """Return the program in an answer: the last fenced block where there is one, closed or not, else all of it."""
    blocks = re.findall(r"```(?:python)?\n(.*?)(?:```|\Z)", answer or "", re.DOTALL)
    return (blocks[-1] if blocks else answer or "").strip()
