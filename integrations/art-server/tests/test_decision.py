"""What a person decides by, of five kinds of runs: did it improve, why did it stop, what fails, what did it cost, what next."""

import pytest
from kinds_of_runs import KINDS, TASKS, run_of
from recorded_runs import call

from art_core.store import Store
from art_server.decision import decision
from art_server.paired import changes
from art_server.reading import trajectories
from art_server.store_view import RolloutFilter
from art_server.two_runs import between, measures


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("kinds")
    return {kind: run_of(root / kind, kind) for kind in KINDS}


def of(runs, kind):
    return decision(kind, runs[kind])


def test_an_improved_run_is_better_by_an_interval_on_the_same_tasks(runs):
    [change] = of(runs, "improved").changes
    assert (change.verdict, change.tasks, change.won, change.lost) == ("better", TASKS, 22, 1)
    assert (change.before, change.after) == (0.2, 0.725) and 0.3 < change.low < change.value < change.high < 0.7


def test_a_flat_run_is_neither_better_nor_worse(runs):
    assert [it.verdict for it in of(runs, "flat").changes] == ["can't tell"]


def test_a_run_without_a_second_evaluation_has_no_verdict(runs):
    it = of(runs, "crashed")
    assert it.changes == [] and it.failing.measured == TASKS


def test_training_rewards_that_rise_without_held_out_success_are_a_sign(runs):
    [sign] = of(runs, "hacked").signs
    assert "training batches rose from" in sign and "40 held-out tasks it went from 0.2 to 0.125" in sign
    assert all(of(runs, kind).signs == [] for kind in KINDS if kind != "hacked")


def test_failures_are_grouped_and_tasks_that_were_lost_come_first(runs):
    failing = of(runs, "improved").failing
    assert (failing.failed, failing.measured) == (11, TASKS)
    reasons = {it.reason: it.rollouts for it in failing.reasons}
    assert reasons == {
        "wrong name": 6,
        "wrong date": 4,
        "a model call was cut off at its token limit": 2,
        "ValueError: no inbox": 1,
        "called is 0": 1,
    }
    first, *others = failing.tasks
    assert first.lost and (first.task_id, first.before, first.after) == ("task0", "before-0", "after-0")
    assert not any(task.lost for task in others)


def test_notes_that_never_repeat_are_no_reasons(tmp_path):
    run_of(tmp_path, "improved")
    with Store(tmp_path / "run.sqlite") as store:
        ids = [f"after-{task}" for task in range(TASKS)]
        notes = [{"ruler": f"explanation {task}"} for task in range(TASKS)]
        store.add_scores(ids, [0.0] * TASKS, metrics=[{"success": 0.0}] * TASKS, notes=notes)
    failing = decision("run", tmp_path).failing
    assert failing.failed == TASKS and not any("explanation" in it.reason for it in failing.reasons)


def test_without_successes_the_lowest_rewards_are_listed(tmp_path):
    run_of(tmp_path, "improved")
    with Store(tmp_path / "run.sqlite") as store:
        ids = [f"{name}-{task}" for name in ("before", "after") for task in range(TASKS)]
        store.add_scores(ids, [task / 100 for task in range(TASKS)] + [0.1 + task / 100 for task in range(TASKS)])
    it = decision("run", tmp_path)
    assert it.changes[0].value == pytest.approx(0.1) and not it.changes[0].counts_successes
    assert [task.task_id for task in it.failing.tasks[:2]] == ["task0", "task1"] and it.failing.failed == 1


def test_the_cost_is_that_of_training_and_of_the_judge(runs, tmp_path):
    cost = of(runs, "improved").cost
    assert (cost.seconds, cost.rollouts, cost.calls, cost.sampled_tokens) == (540.0, 36, 36, 432) and cost.judge == {}
    run_of(tmp_path, "improved")
    with Store(tmp_path / "run.sqlite") as store:
        store.add_step(
            10, {"judge/requests": 12.0, "judge/cost": 0.25, "judge/input_tokens": 9.0, "judge/output_tokens": 3.0}
        )
    assert decision("run", tmp_path).cost.judge == {"requests": 12, "cost": 0.25, "input_tokens": 9, "output_tokens": 3}


def test_numerical_problems_are_named(runs, tmp_path):
    assert of(runs, "improved").health.problems == []
    assert "differ by 1e-05 nats per token" in of(runs, "improved").health.agreement
    run_of(tmp_path, "improved")
    with Store(tmp_path / "run.sqlite") as store:
        store.add_step(10, {"dropped": 1.0, "logprob_gap": 2.5})
        store.set_meta("calls_elsewhere", {"refused": {"api.openai.com": 3}, "passed": {}})
    dropped, gap, elsewhere = decision("run", tmp_path).health.problems
    assert (
        dropped.startswith("1 of 10 steps were dropped") and "2.5 nats" in gap and elsewhere.startswith("3 model calls")
    )


@pytest.mark.parametrize(
    ("kind", "commands"),
    [
        ("improved", ["art compare {run} --transcripts 3", "art export {run}"]),
        ("flat", ["art train --resume {run} --steps 18"]),
        ("stopped", ["art train --resume {run}"]),
        (
            "crashed",
            ["art train --resume {run}", "art eval app.py:agent HELD_OUT --reward app.py:reward --model {run}"],
        ),
        ("hacked", [None]),
    ],
)
def test_the_next_commands_fit_the_run(runs, kind, commands):
    assert [it.command for it in of(runs, kind).next] == [each and each.format(run=runs[kind]) for each in commands]


def test_tasks_that_were_solved_before_training_are_to_be_replaced(tmp_path):
    run_of(tmp_path, "flat")
    with Store(tmp_path / "run.sqlite") as store:
        ids = [f"{name}-{task}" for name in ("before", "after") for task in range(TASKS)]
        store.add_scores(ids, [1.0] * len(ids), metrics=[{"success": 1.0}] * len(ids))
    [advice] = decision("run", tmp_path).next
    assert advice.text.startswith("Train and evaluate on harder tasks") and advice.command is None


def test_an_interrupted_run_has_nothing_to_fix(tmp_path):
    run_of(tmp_path, "stopped")
    with Store(tmp_path / "run.sqlite") as store:
        store.set_meta("ended", "CancelledError")
    [first, *_] = decision("run", tmp_path).next
    assert first.text == "Resume it: it continues after its last step."


def test_a_dry_run_and_a_recording_are_not_sent_to_an_evaluation(tmp_path):
    for name, meta in (("dry", {"dry_run": True, "reward": "right", "learner": "TorchLearner"}), ("recorded", {})):
        with Store(tmp_path / name / "run.sqlite") as store:
            for key, value in {"ended": "", **meta}.items():
                store.set_meta(key, value)
            store.add_rollout("one", task="t", split="train")
    assert [it.command for it in decision("dry", tmp_path / "dry").next] == [None]
    assert decision("recorded", tmp_path / "recorded").next == []


def test_rollouts_are_ordered_by_how_much_their_tasks_changed(runs):
    folder = runs["improved"]
    page = trajectories(folder, RolloutFilter(), limit=40, offset=0, order="changed", changes=changes(folder))
    assert [each.change for each in page.items] == [-1.0] + [1.0] * 22 + [None] * 17
    assert page.items[0].rollout_id == "after-0" and page.items[-1].rollout_id not in changes(folder)


def test_what_could_not_be_scored_is_left_out(tmp_path):
    run_of(tmp_path, "improved")
    with Store(tmp_path / "run.sqlite") as store:
        store.add_scores([f"after-{task}" for task in range(30)], [None] * 30, metrics=[{}] * 30)
    it = decision("run", tmp_path)
    assert [(change.tasks, change.unscored, change.verdict) for change in it.changes] == [(10, 30, "can't tell")]
    assert {reason.reason: reason.rollouts for reason in it.failing.reasons}["not scored"] == 30


def test_a_metric_that_is_usually_0_is_no_reason(tmp_path):
    run_of(tmp_path, "improved")
    with Store(tmp_path / "run.sqlite") as store:
        ids = [f"after-{task}" for task in range(TASKS)]
        metrics = [{"success": float(task < 30), "illegal": float(task % 2)} for task in range(TASKS)]
        store.add_scores(ids, [it["success"] for it in metrics], metrics=metrics)
    assert not any("illegal" in reason.reason for reason in decision("run", tmp_path).failing.reasons)


@pytest.mark.parametrize("note", [7, None, ["x"]])
def test_strange_notes_and_commands_are_shown_as_texts(tmp_path, note):
    run_of(tmp_path, "crashed")
    with Store(tmp_path / "run.sqlite") as store:
        store.set_meta("command", {"given": [1]})
        store.add_scores(["before-20", "before-21"], [0.0, 0.0], notes=[{"check": note}] * 2)
        store.add_step(6, {"seconds": 10**400})
    assert decision("run", tmp_path).failing.measured == TASKS


def test_two_runs_are_compared_by_the_same_measure(tmp_path):
    first, second = run_of(tmp_path / "flat", "flat"), run_of(tmp_path / "improved", "improved")
    it = between(first, second)
    assert [change.verdict for change in it.changes] == ["better"] and it.rewards == [] and it.changed == 21
    assert it.evaluations == ["after, step 9", "after, step 9"]
    with Store(first / "run.sqlite") as store:
        store.set_meta("reward", "graded")
        for name in ("before", "after"):
            store.add_scores([f"{name}-{task}" for task in range(TASKS)], [1.0] * TASKS)
    it = between(first, second)
    assert it.changes == [] and it.rewards == ["graded", "right"] and measures(first, second) == []


def test_two_runs_are_compared_by_what_their_tasks_took(runs):
    [change] = between(runs["flat"], runs["improved"]).changes
    assert change.p == pytest.approx(2 / 2**21)  # none of 21 fair coins, twice
    took = {each.name: each for each in measures(runs["flat"], runs["improved"])}
    assert {"seconds_p50", "seconds_p95", "prompt_tokens", "sampled_tokens"} <= took.keys()
    sampled = took["sampled_tokens"]
    assert (sampled.first, sampled.second, sampled.difference, sampled.low) == (2, 2, 0, 0)
    assert took["seconds_p50"].first == 20.5 and took["seconds_p95"].first == pytest.approx(38.05)
    assert "cost" not in took  # no price is listed for the model


def test_the_cost_per_task_is_shown_of_the_run_whose_price_is_listed(runs, tmp_path, monkeypatch):
    price = {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6}
    monkeypatch.setattr("art_compare.prices._table", lambda: {"policy": price})
    with Store(run_of(tmp_path, "flat") / "run.sqlite") as store:
        for task in range(TASKS):
            store.add_rollout(f"live-{task}", task={"input": f"Question {task}?"}, split="eval", task_id=f"task{task}")
            usage = {"prompt_tokens": 1000.0, "completion_tokens": 500.0}
            store.record(f"live-{task}", call((), (), usage=usage))
            store.finish_rollout(f"live-{task}", output="x")
            store.add_scores([f"live-{task}"], [1.0], metrics=[{"success": 1.0}])
        live = {
            "name": "live",
            "step": 10,
            "temperature": 1.0,
            "rollout_ids": [f"live-{task}" for task in range(TASKS)],
        }
        store.set_meta("evaluations", [live])
    [cost] = [each for each in measures(runs["improved"], tmp_path) if each.name == "cost"]
    assert cost.first is None and cost.second == pytest.approx(0.002) and cost.difference is None


def test_a_run_without_anything_has_nothing_to_decide(tmp_path):
    with Store(tmp_path / "run.sqlite"):
        pass
    it = decision("run", tmp_path)
    assert (it.changes, it.signs, it.failing, it.cost.rollouts) == ([], [], None, 0)


@pytest.mark.parametrize(
    "evaluations", [7, [None], [{"name": 3}], [{"name": "before", "rollout_ids": "x"}, {"rollout_ids": [1]}]]
)
def test_strange_evaluations_are_passed_over(tmp_path, evaluations):
    with Store(tmp_path / "run.sqlite") as store:
        store.set_meta("evaluations", evaluations)
    assert decision("run", tmp_path).changes == []
