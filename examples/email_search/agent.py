"""An agent that answers questions about a mailbox: LangChain's ``create_agent`` with three tools.

Which mailbox a run uses stands in the agent's input: ``{"messages": [...], "mailbox": seed}``.
"""

from __future__ import annotations

from langchain.agents import AgentState, create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain.tools import ToolRuntime, tool
from langchain_openai import ChatOpenAI
from langgraph.graph.state import CompiledStateGraph

from .mailbox import Message, open_mailbox

SYSTEM_PROMPT = "You answer questions about an inbox."
MAX_MODEL_CALLS = 6
SHOWN = 4
"""A search shows so many results."""


class InboxState(AgentState):
    """What a run starts from."""

    mailbox: int
    """Which mailbox the tools look into."""


def format_results(found: list[Message]) -> str:
    """Return what the agent sees of a search."""
    if not found:
        return "no results"
    lines = [f"{message.subject} from {message.sender} id {message.id}" for message in found[:SHOWN]]
    return "\n".join([f"{len(found)} results", *lines])


def format_message(message: Message | None) -> str:
    """Return what the agent sees of a message."""
    if message is None:
        return "no such email"
    return f"{message.subject} from {message.sender} on {message.sent}\n{message.body}"


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
        ChatOpenAI(model="gpt-4.1-mini", temperature=0),
        tools=TOOLS,
        system_prompt=SYSTEM_PROMPT,
        state_schema=InboxState,
        middleware=[ModelCallLimitMiddleware(run_limit=MAX_MODEL_CALLS, exit_behavior="end")],
    )
