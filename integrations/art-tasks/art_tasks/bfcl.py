"""The Berkeley Function Calling Leaderboard: a question and functions -> the right calls, checked by its own checker.

Data and checker come from the package bfcl-eval (Apache-2.0; Patil et al., "The Berkeley Function Calling Leaderboard", ICML
2025). The package pins a hundred others, which neither needs, so ``art doctor --install bfcl`` installs it without them, in a
folder of its own.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from art_core.errors import ConfigError
from art_core.plugin_api import cache_folder, install_packages
from art_core.types import JsonDict, Tasks, Trajectory
from art_tasks.splits import half

PACKAGE = "bfcl-eval==2026.3.23"
FOLDER = "bfcl"
"""Where the package is, in the cache."""
INSTALL = "art doctor --install bfcl"
FILES = {
    "simple": "simple_python",
    "multiple": "multiple",
    "live-simple": "live_simple",
    "live-multiple": "live_multiple",
}
"""Our names -> names of its files. All have one right call to a Python function."""
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""Its types of parameters -> those of JSON schemas."""
STUBS = {
    "bfcl_eval.constants.model_config": {
        "MODEL_CONFIG_MAPPING": {"art": types.SimpleNamespace(underscore_to_dot=True)}
    },
    "bfcl_eval.eval_checker.ast_eval.type_convertor.java_type_converter": {"java_type_converter": None},
    "bfcl_eval.eval_checker.ast_eval.type_convertor.js_type_converter": {"js_type_converter": None},
}
"""Modules that the checker imports for other models and languages, with all that they import."""
PARSED, NAMED, ARGUMENTS, RIGHT = 0.2, 0.2, 0.6, 0.5
"""Rewards for one well-formed call, for the right function, for the share of right arguments, and for a right call."""


class Bfcl:
    """The suite."""

    origin = "bfcl-eval 2026.3.23 (Berkeley Function Calling Leaderboard v4), Apache-2.0"

    @staticmethod
    def install(say: Callable[[str], None]) -> None:
        """Install bfcl-eval without its dependencies. Raises ConfigError."""
        folder = cache_folder(FOLDER)
        say(f"installing {PACKAGE} without its dependencies in {folder}")
        if not install_packages("--no-deps", "--upgrade", "--target", str(folder), PACKAGE):
            raise ConfigError(f"{PACKAGE} could not be installed, for the reason above; to try again, run: {INSTALL}")
        say(f"installed {PACKAGE}; art tasks bfcl/simple shows what is in it")

    def names(self) -> Sequence[str]:
        """Return the names of its parts."""
        _data()
        return tuple(FILES)

    def load(self, name: str, split: str) -> Tasks:
        """Return half of the tasks: which half was drawn once."""
        if name not in FILES:
            raise ConfigError(f"bfcl has no tasks {name!r}; choose one of {', '.join(FILES)}")
        return Tasks(half(list(_tasks(FILES[name])), split), reward, agent, self.origin)


def _data() -> Path:
    """Return the package's folder of data."""
    folder = cache_folder(FOLDER)
    if not any(Path(path, "bfcl_eval").is_dir() for path in sys.path if path) and folder.is_dir():
        sys.path.append(str(folder))
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"bfcl needs the package {PACKAGE}; run: {INSTALL}")
    return Path(spec.submodule_search_locations[0], "data")


def _tasks(file: str) -> Iterator[JsonDict]:
    folder, name = _data(), f"BFCL_v4_{file}.json"
    answers = {each["id"]: each["ground_truth"] for each in _lines(folder / "possible_answer" / name)}
    for each in _lines(folder / name):
        messages, functions = each["question"][0], each["function"]
        yield {
            "id": each["id"],
            "input": {"messages": messages, "tools": [_tool(function) for function in functions]},
            "functions": functions,
            "answer": answers[each["id"]],
        }


def _lines(file: Path) -> list[JsonDict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _tool(function: JsonDict) -> JsonDict:
    """Return a function in OpenAI's form: names without dots, types of JSON schemas."""
    described = {"name": _callable(function["name"]), "description": function["description"]}
    return {"type": "function", "function": {**described, "parameters": _schema(function["parameters"])}}


def _callable(name: str) -> str:
    return name.replace(".", "_")


def _schema(parameters: Any) -> Any:
    if isinstance(parameters, list):
        return [_schema(each) for each in parameters]
    if not isinstance(parameters, dict):
        return parameters
    schema = {key: _schema(value) for key, value in parameters.items()}
    if isinstance(kind := schema.get("type"), str):
        schema["type"] = TYPES.get(kind, kind)
    return schema


def reward(trajectory: Trajectory) -> float:
    """Return up to 1.5: partial credit for a call, its function and its arguments, and 0.5 if the checker accepts it.

    Without partial credit a small model gets no reward at first, so no group has contrast. Adds the metrics ``success``,
    ``called`` (exactly one well-formed call) and ``named`` (the right function), each 0 or 1, and the note ``bfcl``, the kind of
    error.
    """
    task, calls = trajectory.task, _calls(trajectory.output)
    called = len(calls) == 1
    [expected] = task["answer"][0]
    name, arguments = calls[0] if called else ("", {})
    named = called and name == _callable(expected)
    unnamed = "wrong function" if called else "several calls" if calls else "no call"
    fault = _fault(task, {name: arguments}, task["answer"][0]) if named else unnamed
    success = not fault
    trajectory.metrics.update(success=float(success), called=float(called), named=float(named))
    if fault:
        trajectory.notes["bfcl"] = fault
    share = _share_of_right(task, name, arguments) if named else 0.0
    return PARSED * called + NAMED * named + ARGUMENTS * share + RIGHT * success


def _calls(output: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls of the last message in an agent's output, ``{"messages": [...]}`` in LangChain's or OpenAI's form."""
    from langchain_core.messages import AIMessage, convert_to_messages

    messages = convert_to_messages(output["messages"]) if output else []
    answer = messages[-1] if messages else None
    if not isinstance(answer, AIMessage) or answer.invalid_tool_calls:
        return []
    return [(call["name"], call["args"]) for call in answer.tool_calls]


def _share_of_right(task: JsonDict, name: str, arguments: Mapping[str, Any]) -> float:
    """Return the share of right arguments among those that were passed or are required; 1 if there are none."""
    [(expected, values)] = task["answer"][0].items()
    required = {each for each, allowed in values.items() if "" not in allowed}
    considered = required | set(arguments)
    tried = ((each, {name: {each: arguments[each]}}) for each in considered & set(arguments) & set(values))
    right = sum(not _fault(task, call, {expected: {each: values[each]}}) for each, call in tried)
    return right / len(considered) if considered else 1.0


def _fault(task: JsonDict, call: JsonDict, answer: JsonDict) -> str:
    """Return what kind of error its checker finds in a call, of the parameters that ``answer`` has; empty if it accepts it."""
    [(name, values)] = answer.items()
    function = next(each for each in task["functions"] if each["name"] == name)
    parameters = function["parameters"]
    properties = {each: schema for each, schema in parameters["properties"].items() if each in values}
    described = {**function, "parameters": {**parameters, "properties": properties, "required": [
        each for each in parameters.get("required", ()) if each in values
    ]}}  # fmt: skip
    checker, language = _checker()
    result = checker([described], [call], [answer], language, "simple_python", "art")
    return "" if result["valid"] else result["error_type"].removeprefix("simple_function_checker:").replace("_", " ")


@functools.cache
def _checker() -> tuple[Callable[..., JsonDict], Any]:
    """Return the package's checker, and what it calls Python; both without what they import for other languages."""
    _data()
    for name, content in STUBS.items():
        if name not in sys.modules:
            module = sys.modules[name] = types.ModuleType(name)
            vars(module).update(content)
    checker = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    return checker.ast_checker, importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON


def agent() -> Any:
    """Return a LangGraph graph that answers with the calls of one model call."""
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph

    class State(MessagesState):
        tools: list[JsonDict]

    model = ChatOpenAI(model="policy", api_key="unused: the policy answers", max_tokens=128)

    async def call(state: State) -> JsonDict:
        return {"messages": [await model.bind_tools(state["tools"]).ainvoke(state["messages"])]}

    return StateGraph(State).add_node("call", call).add_edge(START, "call").compile()
