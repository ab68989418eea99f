"""The suites with their real packages, which make test-engines installs, and the errors if a package is missing."""

import importlib.util
import json
import sys

import pytest

import art_core as art
import art_tasks
from art_core.errors import ConfigError
from art_core.plugin_api import Plugins
from art_core.testing import FakeEngine
from art_core.types import Tasks, Trajectory
from art_tasks import bfcl
from art_tasks.reasoning_gym import ReasoningGym

installed = pytest.mark.skipif(
    importlib.util.find_spec("bfcl_eval") is None or importlib.util.find_spec("reasoning_gym") is None,
    reason="make test-engines installs bfcl-eval and reasoning-gym",
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


def test_a_package_that_is_missing_is_named_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv("ART_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"bfcl needs the package bfcl-eval==.*; run: art doctor --install bfcl"):
        art.tasks("bfcl/simple")
    with pytest.raises(ConfigError, match="reasoning-gym is not installed; run: pip install reasoning-gym"):
        art.tasks("reasoning-gym/chain_sum")


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
@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("reasoning-gym/chain_summ", {}, "no data set 'chain_summ'; art tasks reasoning-gym lists them"),
        ("reasoning-gym/letter_counting", {"words": 3}, "no option 'words'; its options: max_words, min_words"),
        ("reasoning-gym/letter_counting", {"min_words": 9, "max_words": 3}, "refuses .*max_words must be"),
        ("reasoning-gym/coin_flip", {"size": 10**4, "min_trials": 1, "max_trials": 1}, "smaller size="),
        ("bfcl/java", {}, "no tasks 'java'; choose one of simple, multiple"),
        ("bfcl/simple", {"size": 3}, "tasks of 'bfcl': got an unexpected keyword argument 'size'"),
    ],
)
def test_what_cannot_be_loaded_says_what_can(name, options, why):
    with pytest.raises(ConfigError, match=why):
        art.tasks(name, **options)


@pytest.mark.engines
@installed
@pytest.mark.parametrize("name", ["bfcl/simple", "reasoning-gym/letter_counting"])
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
