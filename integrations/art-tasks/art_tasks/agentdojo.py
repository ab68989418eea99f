"""AgentDojo: tasks in a simulated office, bank, travel agency or chat, checked by the state that the agent leaves behind.

Tasks, tools and checks come from the package agentdojo (MIT; Debenedetti et al., arXiv 2406.13352). The environments are those
without an attack, and success is what the paper calls utility.
"""

from __future__ import annotations

import functools
import importlib.util
from ast import literal_eval
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from art_core.errors import ConfigError
from art_core.types import JsonDict, Tasks, Trajectory
from art_tasks.splits import half

VERSION = "v1.2.2"
NAMES = ("workspace", "travel", "banking", "slack")
SYSTEM = (
    "You help your user, who works with the tools below. Look up what you do not know with a tool before you act on it."
)
MAX_TOKENS = 128
MAX_CALLS = 16
"""Model calls in a rollout, as in the package's own loop: one, and one after each of 15 rounds of tools."""


class AgentDojo:
    """The suite."""

    origin = f"agentdojo {VERSION}, MIT"

    def names(self) -> Sequence[str]:
        """Return the names of its parts."""
        _suites()
        return NAMES

    def load(self, name: str, split: str) -> Tasks:
        """Return half of the user tasks: which half was drawn once."""
        suites = _suites()
        if name not in NAMES:
            raise ConfigError(f"agentdojo has no tasks {name!r}; choose one of {', '.join(NAMES)}")
        tasks = [_task(name, each) for each in suites[name].user_tasks.values()]
        return Tasks(half(tasks, split), reward, agent, self.origin)


def _task(suite: str, user_task: Any) -> JsonDict:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user_task.PROMPT}]
    return {
        "id": f"{suite}-{user_task.ID}",
        "input": {"messages": messages, "suite": suite, "user_task": user_task.ID},
    }


def _suites() -> dict[str, Any]:
    if importlib.util.find_spec("agentdojo") is None:
        raise ConfigError("agentdojo is not installed; run: pip install agentdojo")
    from agentdojo.task_suite.load_suites import get_suites

    return get_suites(VERSION)


class Desk:
    """The environment of one rollout, and the tools that act on it."""

    def __init__(self, suite: str, user_task: str) -> None:
        from agentdojo.functions_runtime import FunctionsRuntime

        self.suite = _suites()[suite]
        self.user_task = self.suite.user_tasks[user_task]
        self.environment = self.user_task.init_environment(_environment(suite).model_copy(deep=True))
        self.tools = FunctionsRuntime(self.suite.tools)

    def run(self, name: str, arguments: JsonDict) -> str:
        """Call a tool; return its result or its error as text."""
        from agentdojo.agent_pipeline.tool_execution import tool_result_to_str

        result, error = self.tools.run_function(self.environment, name, _with_lists(arguments))
        return error or tool_result_to_str(result)


@functools.cache
def _environment(suite: str) -> Any:
    return _suites()[suite].load_and_inject_default_environment({})


def _with_lists(arguments: JsonDict) -> JsonDict:
    """Return arguments with each list that was written as a string as a list, as the package does."""
    return {name: _as_list(value) if isinstance(value, str) else value for name, value in arguments.items()}


def _as_list(text: str) -> Any:
    try:
        value = literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, list) else text


def reward(trajectory: Trajectory) -> float:
    """Return 1 if the package's check accepts what the agent did and said, else 0.

    The calls that have a result in the agent's messages are run again in a new environment, so nothing but the messages has
    to be kept. Some checks accept an agent that does nothing, but a rollout that failed always gets 0. Adds the metrics
    ``success`` and ``tool_calls``.
    """
    from agentdojo.functions_runtime import FunctionCall
    from agentdojo.types import text_content_block_from_string
    from langchain_core.messages import AIMessage, convert_to_messages

    if trajectory.output is None:
        trajectory.metrics.update(success=0.0, tool_calls=0.0)
        return 0.0
    messages = convert_to_messages(trajectory.output["messages"])
    said = [message for message in messages if isinstance(message, AIMessage)]
    calls = [FunctionCall(function=each["name"], args=each["args"]) for each in _run_calls(messages)]
    desk = Desk(trajectory.task["input"]["suite"], trajectory.task["input"]["user_task"])
    before = desk.environment.model_copy(deep=True)
    for call in calls:
        desk.run(call.function, dict(call.args))
    text = [text_content_block_from_string(said[-1].text)]
    success = desk.suite._check_task_result(desk.user_task, text, before, desk.environment, calls)
    trajectory.metrics.update(success=float(success), tool_calls=float(len(calls)))
    return float(success)


def _run_calls(messages: Sequence[Any]) -> Iterator[JsonDict]:
    """Yield the calls whose results follow: an agent may end with calls that it did not run. Ids may come again."""
    for place, message in enumerate(messages):
        results = takewhile(lambda each: each.type == "tool", messages[place + 1 :])
        ids = {each.tool_call_id for each in results}
        yield from (each for each in getattr(message, "tool_calls", ()) if each["id"] in ids)


def agent() -> Any:
    """Return a LangGraph graph that calls the model and the tools it asks for, until it asks for none."""
    from langchain_core.messages import AIMessage, ToolMessage
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    class State(MessagesState):
        suite: str
        user_task: str
        desk: Any

    model = ChatOpenAI(model="policy", api_key="unused: the policy answers", max_tokens=MAX_TOKENS)

    def open_desk(state: State) -> JsonDict:
        return {"desk": Desk(state["suite"], state["user_task"])}

    async def call(state: State) -> JsonDict:
        tools = [_tool(each) for each in state["desk"].suite.tools]
        return {"messages": [await model.bind_tools(tools).ainvoke(state["messages"])]}

    def use_tools(state: State) -> JsonDict:
        calls = state["messages"][-1].tool_calls
        return {"messages": [
            ToolMessage(state["desk"].run(each["name"], each["args"]), tool_call_id=each["id"]) for each in calls
        ]}  # fmt: skip

    def after_call(state: JsonDict) -> str:
        said = [message for message in state["messages"] if isinstance(message, AIMessage)]
        return "use_tools" if said[-1].tool_calls and len(said) < MAX_CALLS else END

    graph = StateGraph(State, output_schema=MessagesState)
    graph.add_node("open_desk", open_desk).add_node("call", call).add_node("use_tools", use_tools)
    graph.add_edge(START, "open_desk").add_edge("open_desk", "call").add_edge("use_tools", "call")
    graph.add_conditional_edges("call", after_call, ["use_tools", END])
    return graph.compile().with_config(recursion_limit=3 * MAX_CALLS)


def _tool(function: Any) -> JsonDict:
    schema = function.parameters.model_json_schema()
    return {
        "type": "function",
        "function": {"name": function.name, "description": function.description, "parameters": schema},
    }
