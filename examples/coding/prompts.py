"""The agent's prompts, and how it reads the answer."""

from __future__ import annotations

import re
from typing import Any

SYSTEM_PROMPT = "You write Python functions. Answer with the code only."


def opening(request: str) -> list[dict[str, Any]]:
    """Return the first messages of a conversation."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": request}]


def complaint(arguments: list[Any], happened: str, expected: Any) -> str:
    """Return the feedback to the model on a failed example."""
    return f"f({', '.join(map(repr, arguments))}) {happened}, not {expected!r}. Try again."


def code_of(answer: str | None) -> str:
    """Return the program in an answer: the last fenced block, closed or not, else all of it."""
    blocks = re.findall(r"```(?:python)?\n(.*?)(?:```|\Z)", answer or "", re.DOTALL)
    return (blocks[-1] if blocks else answer or "").strip()
