"""The OpenAI Agents SDK, as its users write it: a front desk hands over to an agent that searches the inbox.

The front desk must hand over, so its tokens are forced and never trained; the inbox agent's are.
"""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    FunctionTool,
    ModelSettings,
    OpenAIChatCompletionsModel,
    RunContextWrapper,
    Runner,
    handoff,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from agents.extensions.handoff_filters import remove_all_tools
from openai import AsyncOpenAI

from ..email_search.tasks import MAX_MODEL_CALLS, SYSTEM_PROMPT
from .inbox import ANSWER, TOOLS, Json, use_tool

set_tracing_disabled(True)  # it would send every trace to OpenAI, with a fake key
model = OpenAIChatCompletionsModel("gpt-6-luna", AsyncOpenAI(api_key="unused: the policy answers"))


def function_tool(schema: Json) -> FunctionTool:
    """Convert a tool of ``inbox.py`` for the SDK; the run's context is the mailbox number."""
    function = schema["function"]

    async def use(context: RunContextWrapper[int], arguments: str) -> str:
        return use_tool(function["name"], arguments, context.context)

    return FunctionTool(
        function["name"], function["description"], function["parameters"], use, strict_json_schema=False
    )


inbox = Agent[int](
    name="inbox",
    model=model,
    instructions=SYSTEM_PROMPT,
    tools=[function_tool(schema) for schema in TOOLS],
    tool_use_behavior={"stop_at_tool_names": [ANSWER]},
)
front_desk = Agent[int](
    name="front desk",
    model=model,
    instructions=SYSTEM_PROMPT,
    handoffs=[handoff(inbox, input_filter=remove_all_tools)],  # the inbox agent sees only the question
    model_settings=ModelSettings(tool_choice="transfer_to_inbox"),
)


async def agent(task: Json) -> Any:
    """Answer ``task["question"]`` from ``task["mailbox"]``."""
    try:
        result = await Runner.run(front_desk, task["question"], context=task["mailbox"], max_turns=MAX_MODEL_CALLS + 1)
    except (MaxTurnsExceeded, ModelBehaviorError):  # too many turns, or a call to an unknown tool
        return None
    return result.final_output
