"""Programs as people instrument them, with Langfuse's own SDK, are imported as the conversations that they had."""

import json
import subprocess
import sys

import pytest
from http_server import serving
from starlette.responses import JSONResponse
from starlette.routing import Route

import art_core as art
from art_core.store import Store
from art_embedded.rendering import Renderer
from art_langfuse.account import account
from art_langfuse.api import Project
from art_langfuse.importing import import_traces

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

OPENAI = """
import json, os
from langfuse import get_client, observe, propagate_attributes
from langfuse.openai import OpenAI

client = OpenAI(api_key="k", base_url=os.environ["PROVIDER"])
tools = json.loads(os.environ["TOOLS"])

@observe(name="support")
def support(question):
    with propagate_attributes(session_id="s1", tags=["production"], user_id="u1"):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
        for _ in range(2):
            reply = client.chat.completions.create(model="gpt-4.1", messages=messages, tools=tools, temperature=0.3)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            messages += [{"role": "tool", "tool_call_id": it.id, "content": "shelf 3"} for it in message.tool_calls or ()]
        get_client().score_current_trace(name="quality", value=0.9, comment="kind")
        return message.content

support("Where is the key?")
get_client().flush()
"""

LANGGRAPH = """
import json, os
from langchain_core.messages import ToolMessage
from langchain_openai import ChatOpenAI
from langfuse import get_client
from langfuse.langchain import CallbackHandler
from langgraph.graph import END, START, MessagesState, StateGraph

model = ChatOpenAI(model="gpt-4.1", api_key="k", base_url=os.environ["PROVIDER"]).bind_tools(json.loads(os.environ["TOOLS"]))

def think(state):
    return {"messages": [model.invoke([("system", "Be brief."), *state["messages"]])]}

def act(state):
    return {"messages": [ToolMessage("shelf 3", tool_call_id=it["id"]) for it in state["messages"][-1].tool_calls]}

graph = StateGraph(MessagesState)
graph.add_node("think", think)
graph.add_node("act", act)
graph.add_edge(START, "think")
graph.add_conditional_edges("think", lambda state: "act" if state["messages"][-1].tool_calls else END)
graph.add_edge("act", "think")
graph.compile().invoke({"messages": [("user", "Where is the key?")]}, {"callbacks": [CallbackHandler()]})
get_client().flush()
"""


async def complete(request):
    """Calls the tool first, then answers."""
    body = await request.json()
    answered = any(message["role"] == "tool" for message in body["messages"])
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = {"content": "On shelf 3."} if answered else {"content": None, "tool_calls": [call]}
    message = {"role": "assistant", **said}
    choice = {"index": 0, "message": message, "finish_reason": "stop" if answered else "tool_calls"}
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    return JSONResponse(
        {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": body["model"],
            "choices": [choice],
            "usage": usage,
        }
    )


def run_instrumented(code, monkeypatch):
    with serving(Route("/v1/chat/completions", complete, methods=["POST"])) as provider:
        monkeypatch.setenv("PROVIDER", f"{provider}/v1")
        monkeypatch.setenv("TOOLS", json.dumps([LOOK]))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def imported(folder):
    project = Project(account())
    with Store(folder / "run.sqlite") as store:
        found = import_traces(project, store, [], Renderer("tiny"))
    project.close()
    assert not found.left_out
    [run] = art.load_trajectories(folder)
    return run


def check_conversation(run):
    roles = [[message["role"] for message in call.messages()] for call in run.calls]
    assert roles == [["system", "user", "assistant"], ["system", "user", "assistant", "tool", "assistant"]]
    first, last = run.calls[0].response, run.messages()
    assert (
        first["tool_calls"][0]["function"]["name"] == "look"
        and run.calls[0].request["tools"][0]["function"]["name"] == "look"
    )
    assert [message["content"] for message in last[1:2] + last[3:]] == ["Where is the key?", "shelf 3", "On shelf 3."]
    assert [call.request["model"] for call in run.calls] == ["gpt-4.1"] * 2
    shown = run.calls[0].prompt_ids + run.calls[0].sampled_ids
    assert run.calls[1].prompt_ids[: len(shown)] == shown


@pytest.mark.engines
def test_a_decorated_function_with_langfuses_openai_client(server, tmp_path, monkeypatch):
    run_instrumented(OPENAI, monkeypatch)
    run = imported(tmp_path)
    check_conversation(run)
    assert (run.task, run.output) == ("Where is the key?", "On shelf 3.")
    assert (run.reward, run.notes) == (0.9, {"quality": "kind"})
    assert run.calls[0].request["temperature"] == 0.3


@pytest.mark.engines
def test_a_langgraph_agent_with_langfuses_callbacks(server, tmp_path, monkeypatch):
    run_instrumented(LANGGRAPH, monkeypatch)
    run = imported(tmp_path)
    check_conversation(run)
    assert [call.agent for call in run.calls] == ["think", "think"]
