"""Agents of three frameworks, unchanged: each node's prompt and each tool's description gets better."""

import agents
import pytest
from langchain_core.messages import SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from art_core.testing import FakeEngine
from art_gepa import optimize

TASKS = ["rain", "sunny", "a cloud", "the north wind"]
BETTER = {"Find what": "Find it and spell it backwards.", "Write what": "Write it in capitals."}
"""Beginning of a prompt -> the one that is better."""


def graph_of_two_nodes():
    model = ChatOpenAI(model="gpt-6-luna", api_key="unused", base_url="http://127.0.0.1:9/v1")

    def node(system):
        async def ask(state):
            return {"messages": [await model.ainvoke([SystemMessage(system), state["messages"][-1]])]}

        return ask

    graph = StateGraph(MessagesState)
    graph.add_node("finder", node("Find what the user means."))
    graph.add_node("writer", node("Write what was found."))
    graph.add_edge(START, "finder").add_edge("finder", "writer").add_edge("writer", END)
    return graph.compile()


@agents.function_tool
def shout(word: str) -> str:
    """Says a word."""
    return word.upper()


def agent_with_a_tool():
    return agents.Agent(
        name="speaker", instructions="You pass on what the user says.", model="gpt-6-luna", tools=[shout]
    )


def reversed_and_loud(request):
    """Each node does what its prompt asks for."""
    system, text = request["messages"][0]["content"], request["messages"][-1]["content"]
    text = text[::-1] if "backwards" in system else text
    return text.upper() if "capitals" in system else text


def uses_a_tool_that_says_what_it_does(request):
    [tool] = request["tools"]
    last = request["messages"][-1]
    if last["role"] == "tool" or "loudly" not in tool["function"]["description"]:
        return last["content"]
    arguments = f'{{"word": "{last["content"]}"}}'
    return {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "shout", "arguments": arguments}}]}


def reflector(prompt):
    if "Says a word." in prompt.partition("# Example")[0]:
        return "```\nSays a word loudly.\n```"
    new = next((text for start, text in BETTER.items() if start in prompt.partition("# Example")[0]), "Do well.")
    return f"```\n{new}\n```"


async def test_two_nodes_of_a_graph_get_better_prompts_in_one_search(tmp_path):
    def reward(trajectory):
        text = trajectory.output["messages"][-1].content
        return 0.5 * text.isupper() + 0.5 * (text.lower() == trajectory.task[::-1])

    tasks = [task for task in TASKS if task != task[::-1]]
    result = await optimize(
        graph_of_two_nodes(), tasks, model="tiny", engine=FakeEngine(reversed_and_loud), reward=reward, reflector=reflector,
        run_dir=tmp_path / "run", rollouts=60, progress=False,
    )  # fmt: skip
    assert (result.before, result.after) == (0.0, 1.0) and result.rollouts <= 60
    assert {it.component: it.replace for it in result.changes} == {
        "finder: system prompt": "Find it and spell it backwards.",
        "writer: system prompt": "Write it in capitals.",
    }


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
async def test_a_tool_of_the_agents_sdk_gets_a_better_description(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    result = await optimize(
        agent_with_a_tool(), TASKS, model="tiny", engine=FakeEngine(uses_a_tool_that_says_what_it_does),
        reward=lambda it: float(str(it.output).isupper()), reflector=reflector, run_dir=tmp_path / "run", rollouts=60,
        progress=False,
    )  # fmt: skip
    assert (result.before, result.after) == (0.0, 1.0) and result.rollouts <= 60
    assert [(it.component, it.replace) for it in result.changes] == [("tool shout", "Says a word loudly.")]
