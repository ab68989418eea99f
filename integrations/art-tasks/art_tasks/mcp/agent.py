"""The stock agent for the tools of an MCP server: a LangGraph graph."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from art_core.types import JsonDict
from art_tasks.mcp.server import Server

if TYPE_CHECKING:
    from langgraph.pregel import Pregel

SYSTEM = "You solve the user's task with the tools that you have. When you are done, answer in one or two sentences."


def agent_of(
    server: str | Server,
    *,
    model: str = "policy",
    system: str = SYSTEM,
    max_calls: int = 8,
) -> Pregel:
    """Return a LangGraph graph that calls the model and the server's tools it asks for, until it asks for none.

    ``server`` is a ``Server`` or the address of one. ``model`` is the name that is sent to OpenAI's API, or to the server at
    OPENAI_BASE_URL, if the agent runs by itself; in training and evaluation the policy answers. ``max_calls`` is the limit of a
    rollout's model calls.
    """
    from langchain_core.messages import AIMessage, SystemMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    tools = server if isinstance(server, Server) else Server(server)
    chat = ChatOpenAI(model=model, api_key=os.environ.get("OPENAI_API_KEY", "unused: the policy answers"))

    async def call(state: JsonDict) -> JsonDict:
        bound = chat.bind_tools(await tools.tools())
        return {"messages": [await bound.ainvoke([SystemMessage(system), *state["messages"]])]}

    async def use_tools(state: JsonDict) -> JsonDict:
        answer = state["messages"][-1]
        # One after the other, as the model wrote them: a later one may need what an earlier one did.
        results = [
            ToolMessage(await tools.call(it["name"], it["args"]), tool_call_id=it["id"]) for it in answer.tool_calls
        ]
        broken = [
            ToolMessage(f"Error: the arguments are not JSON: {it['args']}", tool_call_id=it["id"])
            for it in answer.invalid_tool_calls
        ]
        return {"messages": results + broken}

    def after_call(state: JsonDict) -> str:
        answers = [message for message in state["messages"] if isinstance(message, AIMessage)]
        asks = answers[-1].tool_calls or answers[-1].invalid_tool_calls
        return "use_tools" if asks and len(answers) < max_calls else END

    graph = StateGraph(MessagesState)
    graph.add_node("call", call).add_node("use_tools", use_tools)
    graph.add_edge(START, "call").add_edge("use_tools", "call")
    graph.add_conditional_edges("call", after_call, ["use_tools", END])
    return graph.compile().with_config(recursion_limit=3 * max_calls)
