"""A LangGraph graph of three nodes that each call a model: one searches a mailbox, one opens a message, one answers.

As its users write it: it doesn't mention art.
"""

from __future__ import annotations

from typing import Literal

from langchain_core.messages import AIMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph

from ..any_agent.inbox import TOOLS, use_tool
from ..email_search.tasks import SYSTEM_PROMPT

NODES = {"searcher": "search_inbox", "reader": "read_email", "writer": "return_final_answer"}
"""Each node and the one tool that it uses."""
MAX_SEARCHES = 2
NOTHING_FOUND = "no results"


class TeamState(MessagesState):
    """What the nodes share."""

    mailbox: int


def build_agent() -> CompiledStateGraph:
    """Return the graph; the key comes from ``OPENAI_API_KEY``, as usual.

    searcher -> reader -> writer; a search without results is repeated, up to ``MAX_SEARCHES`` searches.
    """
    graph = StateGraph(TeamState)
    for name, tool in NODES.items():
        graph.add_node(name, _asking(tool))
    graph.add_edge(START, "searcher")
    graph.add_conditional_edges("searcher", _after_search)
    graph.add_edge("reader", "writer")
    graph.add_edge("writer", END)
    return graph.compile()


def _asking(tool: str):
    model = ChatOpenAI(model="gpt-5.6-luna", reasoning_effort="none", temperature=0).bind_tools(TOOLS, tool_choice=tool)

    async def ask(state: TeamState) -> dict[str, list[AIMessage | ToolMessage]]:
        reply = await model.ainvoke([SystemMessage(SYSTEM_PROMPT), *state["messages"]])
        results = [
            ToolMessage(use_tool(it["name"], it["args"], state["mailbox"]), name=it["name"], tool_call_id=it["id"])
            for it in reply.tool_calls
        ]
        return {"messages": [reply, *results]}

    return ask


def _after_search(state: TeamState) -> Literal["searcher", "reader"]:
    searches = sum(isinstance(message, AIMessage) for message in state["messages"])
    return "searcher" if state["messages"][-1].text == NOTHING_FOUND and searches < MAX_SEARCHES else "reader"
