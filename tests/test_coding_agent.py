"""The coding example: its tasks, its agent and reward with a scripted model, and a short real training."""

from __future__ import annotations

import random
import re

import pytest

import art_audit

pytest.importorskip("openai")
pytest.importorskip("transformers")

import art_core as art
from art_core.testing import FakeEngine
from examples.coding.agent import write_function
from examples.coding.demonstrations import SLIPS, converse, draw_program
from examples.coding.phrases import FAMILIES
from examples.coding.prompts import code_of
from examples.coding.reward import reward
from examples.coding.sandbox import Sandbox
from examples.coding.tasks import combinations, draw_request, draw_tests, held_out_tasks, solution, training_tasks


def asked(tasks):
    """The requests, with any number in place of each number."""
    return {re.sub(r"\d", "#", task["input"]["request"]) for task in tasks}


def test_no_combination_is_both_trained_and_held_out_and_every_part_is_trained():
    training, held_out = combinations(held_out=False), combinations(held_out=True)
    assert len(held_out) >= 200
    assert not set(training) & set(held_out)
    assert {part for _, parts in held_out for part in parts} <= {part for _, parts in training for part in parts}
    assert not asked(training_tasks(1000)) & asked(held_out_tasks(300))


def test_held_out_tasks_are_as_many_different_functions():
    tasks = held_out_tasks(150)
    assert len(asked(tasks)) == 150
    assert tasks == held_out_tasks(150)
    assert held_out_tasks(150, seed=1) != tasks


def test_demonstrations_are_of_training_combinations_alone():
    rng = random.Random(0)
    shown = {re.sub(r"\d", "#", converse(rng, skilled=False)[1]["content"]) for _ in range(500)}
    assert not shown & asked(held_out_tasks(300))


@pytest.mark.system
def test_solutions_pass_their_tests_in_the_sandbox_and_slips_fail_them():
    rng = random.Random(0)
    slips = failed = 0
    with Sandbox(servers=1) as sandbox:
        for family in FAMILIES:
            some = [it for it in combinations(held_out=True) if it[0] is family]
            for combination in rng.sample(some, 20):
                _, ks = draw_request(rng, combination)
                tests = draw_tests(rng, combination, ks)
                right = solution(combination, ks)
                assert all(it.passed for it in sandbox.test(right, tests)), right
                assert right == draw_program(rng, combination, ks, skilled=True)
                careless = draw_program(rng, combination, ks, skilled=False)
                slips += careless != right
                failed += careless != right and not all(it.passed for it in sandbox.test(careless, tests))
    # Some slips come to the same: max([], default=0) of numbers above 5, or x >= 3 of even numbers.
    assert slips >= 30
    assert failed >= 0.9 * slips


def test_every_part_has_its_slips():
    for family in FAMILIES:
        assert {part.name for table in family.parts for part in table} == set(SLIPS[family.name])


@pytest.mark.parametrize(
    ("answer", "program"),
    [
        ("def f(): pass", "def f(): pass"),
        ("Here it is:\n```python\ndef f(): pass\n```\nThat is all.", "def f(): pass"),
        ("```\ndef f(): pass\n```", "def f(): pass"),
        ("```python\ndef f(): pass", "def f(): pass"),
        (None, ""),
    ],
)
def test_the_program_is_what_stands_in_the_last_block(answer, program):
    assert code_of(answer) == program


TASK = {
    "input": {"request": "Write f(x) that returns x plus 1.", "examples": [[[1], 2], [[2], 3]]},
    "tests": [[[0], 1], [[9], 10]],
}


async def run_with(replies, tmp_path):
    """Run the agent once, with a model that says these."""
    report = await art.evaluate(
        write_function,
        [TASK],
        model="tiny",
        engine=FakeEngine(replies),
        reward=reward,
        run_dir=tmp_path,
        progress=False,
    )
    return report.trajectories[0]


async def test_the_agent_is_told_what_failed_and_tries_again(tmp_path):
    run = await run_with(["def f(x):\n    return x - 1", "def f(x):\n    return x + 1"], tmp_path)
    assert run.error is None
    assert len(run.calls) == 2
    assert run.calls[1].request["messages"][-1]["content"] == "f(1) returned 0, not 2. Try again."
    assert run.reward == 1.0
    assert (run.metrics["success"], run.metrics["first_try"], run.metrics["tries"]) == (1.0, 0.0, 2.0)


async def test_the_examples_alone_are_no_success(tmp_path):
    run = await run_with("def f(x):\n    return {1: 2, 2: 3, 0: 1}.get(x)", tmp_path)
    assert len(run.calls) == 1
    assert run.reward == pytest.approx(0.15)
    assert run.metrics["success"] == 0.0


async def test_nine_of_ten_hidden_tests_are_no_success():
    tests = [[[x], x + 1] for x in range(9)] + [[[9], 0]]
    run = art.Trajectory({"tests": tests}, (), output=["def f(x):\n    return x + 1"])
    assert await reward(run) == pytest.approx(0.27)
    assert (run.metrics["success"], run.metrics["tests"]) == (0.0, 0.9)


@pytest.mark.engines
@pytest.mark.timeout(900)
def test_the_coding_agent_writes_visibly_better_programs(tmp_path):
    from examples.coding.train import run

    small = {"tasks_per_step": 8, "eval_temperatures": (1.0,), "progress": False}
    result = run(steps=20, run_dir=tmp_path / "run", **small)
    before, after = result.report["before"], result.report["after"]
    assert 0.15 <= before["success"] <= 0.50
    assert after["success"] - before["success"] > 0.12
    assert art_audit.audit(result.run_dir).clean
