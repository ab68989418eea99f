"""Evaluations are paired by task; differences, flips and the gate are those of the tasks that both sides have."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import art_core as art
from art_cli.main import command
from art_compare import Comparison, compare, statistics
from art_compare.command import asked
from art_compare.gate import read_gate
from art_compare.measures import MEASURES
from art_compare.sides import Side
from art_core.errors import ConfigError
from art_core.store import Store
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent

TASKS = [f"task {number}" for number in range(40)]
AGENT = ScriptedAgent(turns=1, max_tokens=8)


def evaluation(folder, solved, tasks=TASKS, agent=AGENT, **settings):
    """Record an evaluation in which the tasks numbered ``solved`` succeed, and return its folder as a text."""

    def reward(trajectory):
        return float(int(trajectory.task.split()[1]) in solved)

    art.evaluate_sync(
        agent, tasks, model="tiny", engine=FakeEngine(), reward=reward, run_dir=folder, progress=False, **settings
    )
    return str(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two evaluations: mine lost task 3 and won 20 to 24; its tasks are in another order, and it has one more."""
    folder = tmp_path_factory.mktemp("runs")
    mine = ["task 99", *reversed(TASKS)]
    return {
        "live": evaluation(folder / "live", range(20)),
        "mine": evaluation(folder / "mine", {*range(25)} - {3}, mine),
    }


def art_compare(*arguments):
    return CliRunner().invoke(command(), ["compare", *map(str, arguments)], env={"COLUMNS": "200"})


def test_tasks_are_paired_whatever_their_order(runs):
    found = compare(runs["live"], runs["mine"])
    flips = found.flips(1)
    assert len(found.keys) == 40
    assert [found.trajectories(key)[0].task for key in flips.lost] == ["task 3"]
    assert {found.trajectories(key)[1].task for key in flips.won} == {f"task {number}" for number in range(20, 25)}
    difference = found.difference("success", 1)
    assert difference.value == pytest.approx(4 / 40)
    assert difference.interval[0] < 4 / 40 < difference.interval[1]
    assert difference.p == pytest.approx(2 * (1 + 6) / 2**6)  # at most 1 of 6 fair coins, twice


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ("one\ntwo", "one two"),
        ({"input": "asked", "answer": 1}, "asked"),
        ({"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "asked"}]}, "asked"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "é"}]}]},
            '[{"type": "text", "text": "é"}]',
        ),
        ({"city": "Rome"}, '{"city": "Rome"}'),
    ],
)
def test_a_task_is_named_by_what_it_asks(task, line):
    assert asked(task) == line


def test_the_command_shows_values_differences_and_the_tasks_that_flipped(runs):
    shown = art_compare(runs["live"], runs["mine"], "--transcripts", 1)
    assert shown.exit_code == 0, shown.output
    assert "50.0%" in shown.output and "60.0%" in shown.output and "+10.0 points" in shown.output
    assert "mine solved 5 tasks that live did not, and lost 1" in shown.output
    assert "  - task 3\n" in shown.output and "  + task 24\n" in shown.output
    assert "mine, the same task" in shown.output
    assert "mine has 1 task more, left out" in shown.output


def test_a_gate_fails_only_if_the_tasks_show_it(runs):
    worse = art_compare(runs["mine"], runs["live"], "--gate", "success >= mine - 0.02, success <= 0.4")
    assert worse.exit_code == 0 and "NOT SHOWN  live: success >= mine - 0.02" in worse.output, worse.output
    assert "with 40 tasks, a loss of" in worse.output
    assert art_compare(runs["mine"], runs["live"], "--gate", "success >= mine", "--strict").exit_code == 3
    assert art_compare(runs["mine"], runs["live"], "--gate", "success >= 0.8").exit_code == 1
    assert art_compare(runs["live"], runs["mine"], "--gate", "success >= 0.2", "--strict").exit_code == 0


def test_costs_are_compared_by_prices(runs):
    prices = {"live": (1.0, 10.0), "mine": (0.1, 1.0)}
    found = compare(runs["live"], runs["mine"], prices=prices, gate="cost <= 0.5 * live, cost <= 0.05 * live")
    assert found.value("cost", 1) == pytest.approx(found.value("cost", 0) / 10)
    assert [verdict.state for verdict in found.verdicts] == ["holds", "fails"]
    with pytest.raises(ConfigError, match="--price"):
        _ = compare(runs["live"], runs["mine"], gate="cost <= live").verdicts
    with pytest.raises(ConfigError, match="no side is called 'other'"):
        compare(runs["live"], runs["mine"], prices={"other": (1, 1)})


def test_a_side_without_a_price_does_not_cost_what_its_crashed_rollouts_cost(runs, tmp_path):
    async def crashes(task_input, address):
        if int(task_input.split()[1]) < 25:
            raise RuntimeError("no mailbox")
        return await AGENT(task_input, address)

    mine = evaluation(tmp_path / "mine", (), agent=crashes)
    found = compare(runs["live"], mine, prices={"live": (1.0, 10.0)}, gate="cost <= 0.5 * live")
    assert found.value("cost", 1) is None and found.difference("cost", 1) is None
    assert len(found.columns("cost", 0)) == len(TASKS), "live's mean is of all tasks"
    with pytest.raises(ConfigError, match="--price NAME=PROMPT/SAMPLED"):
        _ = found.verdicts
    priced = compare(runs["live"], mine, prices={"live": (1.0, 10.0), "mine": (1.0, 10.0)})
    assert priced.value("cost", 1) == pytest.approx(priced.value("cost", 0) * 15 / 40, rel=0.01)


def test_json_has_every_flip_with_its_rollouts(runs):
    found = json.loads(art_compare(runs["live"], runs["mine"], "--json", "--gate", "success >= live").output)
    assert found["measures"]["success"]["values"] == {"live": 0.5, "mine": 0.6}
    assert [flip["task"] for flip in found["flips"]["mine"]["lost"]] == ["task 3"]
    assert len(found["flips"]["mine"]["won"][0]["rollout_ids"]) == 2
    assert found["gate"][0]["state"] == "not shown"


def test_json_has_a_cost_that_only_the_second_side_has(runs):
    found = json.loads(art_compare(runs["live"], runs["mine"], "--json", "--price", "mine=0.1/1").output)
    values = found["measures"]["cost"]["values"]
    assert values["live"] is None and values["mine"] > 0


def test_one_folder_is_compared_before_and_after_training(tmp_path):
    trained = tmp_path / "run"
    art.train_sync(
        AGENT, TASKS[:4], model="tiny", engine=FakeEngine(), reward=lambda t: float(len(t.task) > 6), run_dir=trained, steps=1,
        tasks_per_step=1, group_size=2, learner=CountingLearner(), eval_tasks=TASKS[:8], progress=False,
    )  # fmt: skip
    assert [side.name for side in compare(str(trained)).sides] == ["before", "after"]
    three = compare(f"start={trained}@before", f"{trained}@after", f"end={trained}@after")
    assert [side.name for side in three.sides] == ["start", "after", "end"]


def test_what_cannot_be_compared_is_refused_with_what_to_do(runs, tmp_path):
    for arguments, message in (
        ((tmp_path / "nowhere", runs["mine"]), "is not a run folder"),
        ((f"{runs['live']}@after", runs["mine"]), "has no evaluation 'after'; it has 'evaluation'"),
        ((runs["live"], runs["live"]), "NAME=SIDE"),
        ((runs["live"], runs["mine"], "--temperature", 1), "not all evaluated at temperature 1"),
        ((runs["live"], runs["mine"], "--gate", "succes >= live"), "is not a condition"),
        ((runs["live"], runs["mine"], "--gate", "success >= other"), "The sides are live, mine"),
        *(
            ((runs["live"], runs["mine"], "--price", f"live={price}"), "PROMPT/SAMPLED")
            for price in ("1", "-1/1", "1/inf", "nan/1")
        ),
        ((runs["live"], f"o={evaluation(tmp_path / 'other', (), ['task 100'])}"), "no task in common"),
    ):
        refused = art_compare(*arguments)
        assert refused.exit_code == 2
        assert message in " ".join(refused.output.replace("│", " ").split()), refused.output


def test_a_gate_between_sides_that_different_rewards_scored_is_refused(runs, tmp_path):
    def lenient(trajectory):
        return 1.0

    other = tmp_path / "other"
    art.evaluate_sync(AGENT, TASKS, model="tiny", engine=FakeEngine(), reward=lenient, run_dir=other, progress=False)
    for gate in ("success >= live", "reward >= 0.5 * live"):
        refused = art_compare(runs["live"], other, "--gate", gate, "--strict")
        assert refused.exit_code == 2
        assert "live was scored by reward, other by lenient" in " ".join(refused.output.replace("│", " ").split())
    shown = art_compare(runs["live"], other, "--gate", "calls <= live + 1, success >= 0.5")
    assert shown.exit_code == 0 and "scored by different rewards: lenient, reward" in shown.output


def test_the_gate_that_is_advised_is_one_that_is_taken(runs, tmp_path):
    def graded(trajectory):
        return 0.25 + len(trajectory.task) / 100

    sides = [tmp_path / name for name in ("first", "second")]
    for folder in sides:
        art.evaluate_sync(
            AGENT, TASKS, model="tiny", engine=FakeEngine(), reward=graded, run_dir=folder, progress=False
        )
    assert 'next: --gate "reward >= first - 0.02" decides' in art_compare(*sides).output
    assert art_compare(*sides, "--gate", "reward >= first - 0.02").exit_code == 0
    assert 'next: --gate "success >= live - 0.02" decides' in art_compare(runs["live"], runs["mine"]).output
    assert "next: --transcripts 3" in art_compare(runs["live"], sides[0]).output, "scored by different rewards"


def test_a_training_runs_side_is_scored_by_the_reward_of_its_evaluations(tmp_path):
    def exact(trajectory):
        return 1.0

    trained = tmp_path / "run"
    art.train_sync(
        AGENT, TASKS[:4], model="tiny", engine=FakeEngine(), reward=lambda t: float(len(t.task) > 6), eval_reward=exact,
        run_dir=trained, steps=1, tasks_per_step=1, group_size=2, learner=CountingLearner(), eval_tasks=TASKS[:8],
        progress=False,
    )  # fmt: skip
    assert [side.reward for side in compare(str(trained)).sides] == ["exact", "exact"]


def test_a_recording_without_a_checkpoint_is_not_advised_to_be_evaluated_as_a_model(runs, tmp_path):
    with Store(tmp_path / "run.sqlite"):
        pass
    with pytest.raises(ConfigError, match="or pass the folder of an `art eval`"):
        compare(runs["live"], str(tmp_path))


def test_tasks_that_occur_twice_are_paired_in_order(tmp_path):
    twice = [*TASKS[:2], *TASKS[:2]]
    found = compare(evaluation(tmp_path / "a", (0,), twice), evaluation(tmp_path / "b", (0, 1), twice))
    assert len(found.keys) == 4 and len(found.flips(1).won) == 2


def test_a_task_without_a_score_does_not_count_for_the_reward(tmp_path):
    def unable(trajectory):
        if trajectory.task == "task 0":
            raise RuntimeError("the judge is away")
        return 0.5

    for name in "ab":
        art.evaluate_sync(
            AGENT, TASKS[:3], model="tiny", engine=FakeEngine(), reward=unable, run_dir=tmp_path / name, progress=False
        )
    found = compare(str(tmp_path / "a"), str(tmp_path / "b"))
    assert found.value("reward", 0) == 0.5 and found.value("success", 0) is None
    assert len(found.columns("reward", 0, 1)) == 2 and not found.flips(1).lost


# The statistics


def pairs(random, tasks, lost, won):
    """Draw tasks that only the first side solves, only the second, or else both or neither."""
    drawn = random.random(tasks)
    first, second = drawn < lost, (drawn >= lost) & (drawn < lost + won)
    both = ~first & ~second & (random.random(tasks) < 0.6)
    return np.stack([first | both, second | both], axis=1).astype(float)


def states(gate, columns):
    """Return what a gate says of each pair of columns, as shares of all."""
    conditions = read_gate(gate, ["live", "mine"])
    sides = tuple(Side(name, Path(), "evaluation", None, None, {}) for name in ("live", "mine"))
    measure = MEASURES[conditions[0].measure].of
    found = [Comparison(sides, (), {measure: values}, conditions).verdicts[0].state for values in columns]
    return {state: found.count(state) / len(found) for state in ("fails", "holds", "not shown")}


@pytest.mark.parametrize(("tasks", "unequal"), [(200, 0.2), (200, 0.04), (50, 0.3), (20, 0.4)])
@pytest.mark.parametrize("gate", ["success >= live", "success >= live - 0.02", "success <= live"])
def test_a_gate_is_seldom_wrong_about_equal_models(tasks, unequal, gate):
    random = np.random.default_rng(0)
    found = states(gate, [pairs(random, tasks, unequal / 2, unequal / 2) for _ in range(1000)])
    assert found["fails"] <= statistics.LEVEL + 0.014  # two standard errors of 1,000 comparisons


@pytest.mark.parametrize(("tasks", "unequal"), [(200, 0.2), (50, 0.3), (20, 0.4)])
def test_a_gate_without_a_margin_is_never_wrong_more_often_than_stated(tasks, unequal):
    wrong = 0.0
    for apart in range(tasks + 1):
        chance = math.comb(tasks, apart) * unequal**apart * (1 - unequal) ** (tasks - apart)
        columns = [
            np.array([[1.0, 0.0]] * (apart - won) + [[0.0, 1.0]] * won + [[1.0, 1.0]] * (tasks - apart))
            for won in range(apart + 1)
        ]
        if chance > 1e-6:
            fails = (states("success >= live", [column])["fails"] for column in columns)
            wrong += chance * sum(f * math.comb(apart, won) / 2**apart for won, f in enumerate(fails))
    assert 0 < wrong <= statistics.LEVEL


@pytest.mark.parametrize("tasks", [1, 3, 10, 20, 200])
@pytest.mark.parametrize("rate", [0.02, 0.1, 0.5, 0.9])
def test_a_number_as_bound_is_never_wrong_more_often_than_stated(tasks, rate):
    wrong = sure = 0.0
    for solved in range(tasks + 1):
        chance = math.comb(tasks, solved) * rate**solved * (1 - rate) ** (tasks - solved)
        column = np.array([[0.0, 1.0]] * solved + [[0.0, 0.0]] * (tasks - solved))
        found = states(f"success >= {rate}", [column])
        wrong, sure = wrong + chance * found["fails"], sure + chance * found["holds"]
    assert wrong <= statistics.LEVEL + 1e-12 and sure <= statistics.LEVEL + 1e-12


def test_few_tasks_show_nothing_of_other_measures():
    one = np.array([[1.0, 1.01]] * 3)
    assert states("cost <= live", [one])["not shown"] == 1


def test_conditions_name_sides_with_dashes_margins_without_blanks_and_negative_bounds():
    sides = ["run-2", "live", "2025-11"]
    found = {text: read_gate(text, sides)[0] for text in (
        "success >= run-2", "success >= live-0.02", "success >= run-2 - 0.1", "reward >= -0.5", "cost <= 0.5 * 2025-11",
    )}  # fmt: skip
    assert [(it.side, it.factor, it.constant) for it in found.values()] == [
        ("run-2", 1, 0), ("live", 1, -0.02), ("run-2", 1, -0.1), (None, 0, -0.5), ("2025-11", 0.5, 0),
    ]  # fmt: skip


def test_a_side_is_not_compared_with_itself(runs):
    found = compare(runs["live"], runs["mine"], f"third={runs['mine']}", gate="success >= mine - 0.02")
    assert [verdict.side for verdict in found.verdicts] == ["third"]


@pytest.mark.parametrize("unequal", [0.12, 0.2, 0.3, 0.4])
def test_a_gate_finds_ten_points_of_200_tasks_as_often_as_stated(unequal):
    random = np.random.default_rng(0)
    worse = [pairs(random, 200, unequal / 2 + 0.05, unequal / 2 - 0.05) for _ in range(1000)]
    assert states("success >= live", worse)["fails"] == pytest.approx(statistics.power(0.1, unequal, 200), abs=0.05)


@pytest.mark.system
@pytest.mark.parametrize("gate", ["reward >= live", "cost <= live", "seconds_p95 <= 1.0 * live"])
def test_a_gate_is_seldom_wrong_about_numbers_with_a_long_tail(gate):
    random = np.random.default_rng(0)

    def drawn():
        task = random.exponential(1, (200, 1))
        return task + random.exponential(1, (200, 2))

    # 5 %, and what chance adds in 200 comparisons.
    assert states(gate, [drawn() for _ in range(200)])["fails"] <= statistics.LEVEL + 0.04
