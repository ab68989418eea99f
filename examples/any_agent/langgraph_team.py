"""A LangGraph graph, as its users write it, of three nodes that each call a model: one searches, one reads, one answers.

``train.py`` trains the first two; the third stays as it is.
"""

from __future__ import annotations

from langchain_core.messages import AIMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command

from ..email_search.tasks import MAX_MODEL_CALLS, SYSTEM_PROMPT
from .inbox import ANSWER, TOOLS, use_tool

SUCCESSORS = {"search_inbox": "reader", "read_email": "writer"}
"""The next node after each tool."""


class TeamState(MessagesState):
    """What the nodes share."""

    mailbox: int


def build_agent() -> CompiledStateGraph:
    """Return the graph; the key comes from ``OPENAI_API_KEY``, as usual."""
    model = ChatOpenAI(model="gpt-5.6-luna", reasoning_effort="none", temperature=0).bind_tools(TOOLS)

    async def ask(state: TeamState) -> Command:
        """Call the model, run the tools that it calls, and hand over to the next node."""
        reply = await model.ainvoke([SystemMessage(SYSTEM_PROMPT), *state["messages"]])
        results = [
            ToolMessage(use_tool(it["name"], it["args"], state["mailbox"]), name=it["name"], tool_call_id=it["id"])
            for it in reply.tool_calls
        ]
        asked = sum(isinstance(message, AIMessage) for message in state["messages"]) + 1
        last = results[-1].name if results else ANSWER
        done = last == ANSWER or asked >= MAX_MODEL_CALLS
        return Command(goto=END if done else SUCCESSORS.get(last, "searcher"), update={"messages": [reply, *results]})

    graph = StateGraph(TeamState)
    for name in ("searcher", "reader", "writer"):
        graph.add_node(name, ask, destinations=("searcher", "reader", "writer", END))
    return graph.add_edge(START, "searcher").compile()
