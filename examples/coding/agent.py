"""An agent that writes small Python functions, as its users write it: it calls the OpenAI client and runs the program.

It doesn't mention art. If the first answer fails an example, it asks for a second one.
"""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from .prompts import code_of, complaint, opening
from .sandbox import shared

TRIES = 2
MAX_TOKENS = 96
"""Of an answer: these functions have one line."""

client = OpenAI(api_key="unused: the policy answers", base_url="https://api.openai.com/v1")


def write_function(task: dict[str, Any]) -> list[str]:
    """Return every program written for ``task["request"]``; the last one is the answer."""
    messages, programs = opening(task["request"]), []
    for _ in range(TRIES):
        reply = client.chat.completions.create(
            model="gpt-6-luna",
            messages=messages,
            max_completion_tokens=MAX_TOKENS,
            reasoning_effort="none",
            temperature=0,
        )
        answer = reply.choices[0].message.content or ""
        programs.append(code_of(answer))
        failed = failed_example(programs[-1], task["examples"])
        if failed is None:
            break
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": failed}]
    return programs


def failed_example(program: str, examples: list[list[Any]]) -> str | None:
    """Return the feedback on the first example that the program fails, if any."""
    results = shared().test(program, examples)
    for result, (arguments, expected) in zip(results, examples, strict=True):
        if not result.passed:
            return complaint(arguments, result.happened, expected)
    return None
