"""The plugin for the Claude Agent SDK: a ``ClaudeAgentOptions`` is an agent.

The SDK starts Claude Code as a child process, which finds the rollout's address in its environment.
"""

from __future__ import annotations

from typing import Any

from art_core import hookimpl
from art_core.types import RolloutAddress, RunAgent
from art_http.frameworks import is_a


@hookimpl
def adapt_agent(agent: object) -> RunAgent | None:
    """Run ``query`` with a task as its prompt; the output is the text or the structured output of its last result."""
    if not is_a(agent, "claude_agent_sdk.ClaudeAgentOptions"):
        return None

    async def run(task_input: Any, address: RolloutAddress) -> Any:
        from claude_agent_sdk import ResultMessage, query

        # To the end: if sub-agents go on behind the first result, another follows.
        messages = [message async for message in query(prompt=task_input, options=agent)]
        last = [message for message in messages if isinstance(message, ResultMessage)][-1]
        return last.result if last.structured_output is None else last.structured_output

    return run
