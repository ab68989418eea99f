"""An agent that answers questions about a mailbox: LangChain's ``create_agent`` with three tools.

The agent's input names the mailbox: ``{"messages": [...], "mailbox": seed}``.
"""

from __future__ import annotations

from langchain.agents import AgentState, create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain.tools import ToolRuntime, tool
from langchain_openai import ChatOpenAI
from langgraph.graph.state import CompiledStateGraph

from .mailbox import format_message, format_results, open_mailbox
from .tasks import MAX_MODEL_CALLS, SYSTEM_PROMPT


class InboxState(AgentState):
    """The start state of a rollout."""

    mailbox: int
    """The mailbox that the tools search."""


@tool
def search_inbox(
    keywords: list[str], runtime: ToolRuntime, sender: str = "", sent_after: str = "", sent_before: str = ""
) -> str:
    """Search emails."""
    mailbox = open_mailbox(runtime.state["mailbox"])
    return format_results(mailbox.search(keywords, sender, sent_after, sent_before))


@tool
def read_email(id: int, runtime: ToolRuntime) -> str:
    """Read one email."""
    return format_message(open_mailbox(runtime.state["mailbox"]).read(id))


@tool(return_direct=True)
def return_final_answer(answer: str) -> str:
    """Answer the user."""
    return answer


TOOLS = [search_inbox, read_email, return_final_answer]


def build_agent() -> CompiledStateGraph:
    """Return the agent; the key comes from ``OPENAI_API_KEY``, as usual."""
    return create_agent(
        ChatOpenAI(model="gpt-5.6-luna", reasoning_effort="none", temperature=0),
        tools=TOOLS,
        system_prompt=SYSTEM_PROMPT,
        state_schema=InboxState,
        middleware=[ModelCallLimitMiddleware(run_limit=MAX_MODEL_CALLS, exit_behavior="end")],
    )
