"""Hints: what changed together with the reward, said only where it did."""

import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbered_runs import settings
from reward_fakes import settings as short
from rich.console import Console

import art_core as art
from art_cli.hints import Shape, hints, hints_of, within_groups
from art_cli.summary import print_result
from art_core.plugin_api import wilson_interval
from art_core.store import Store
from art_core.testing import FakeEngine, ScriptedAgent
from art_core.types import Call


def shape(group="g", reward=0.0, tokens=10, **more):
    told = {"task_id": group, "failed": False, "calls": 1, "cut_off": 0, "answer": None, **more}
    return Shape(rollout_id=f"{group}/{reward}", group=group, reward=reward, sampled_tokens=tokens, **told)


def run_of(tmp_path, steps, size=8, groups=4):
    """A store of as many steps as functions of (group, run) in ``steps``, each of which says how one run went."""
    store = Store(tmp_path / "run.sqlite")
    for step, went in enumerate(steps, start=1):
        for group in range(groups):
            for run in range(size):
                one, name = went(group, run), f"{step}/{group}/{run}"
                store.add_rollout(
                    name, task=group, step=step, split="train", task_id=f"t{group}", group=f"{step}/{group}"
                )
                for _ in range(one.get("calls", 1)):
                    ids = one.get("ids") or (7,) * one.get("tokens", 10)
                    finish = "length" if one.get("cut_off") else "stop"
                    call = Call(prompt_ids=(1,), sampled_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason=finish)
                    store.record(name, call)
                store.finish_rollout(name, output="x", error="it failed" if one.get("failed") else None)
                store.add_scores([name], [one["reward"]])
    return store


def found(tmp_path, first, last, third=3, metrics=None, evaluations=(), **more):
    with run_of(tmp_path, [first] * third + [last] * 2 * third, **more) as store:
        history = [
            (step + 1, {"groups_with_contrast": 1.0, **(metrics(step) if metrics else {})}) for step in range(3 * third)
        ]
        return hints(store, history, evaluations)


def longer(factor, paid=True):
    return lambda group, run: {"tokens": int(factor * (10 + run)), "reward": float(run if paid else (run * 5) % 8)}


def test_runs_that_grow_because_length_is_paid_are_told_with_their_figures(tmp_path):
    [said] = found(tmp_path, longer(1), longer(2))
    assert said.startswith(
        "sampled tokens per rollout went from 13.5 to 27, and within groups, rollouts with more have better rewards"
    )
    assert "+1.00" in said


def test_runs_that_shrink_because_brevity_is_paid_are_told_too(tmp_path):
    [said] = found(
        tmp_path,
        lambda group, run: {"tokens": 30 + run, "reward": -float(run)},
        lambda group, run: {"tokens": 5 + run, "reward": -float(run)},
    )
    assert "sampled tokens per rollout went from 33.5 to 8.5" in said and "rollouts with fewer" in said


def test_growth_without_pay_and_pay_without_growth_are_no_hints(tmp_path):
    assert found(tmp_path / "unpaid", longer(1, paid=False), longer(2, paid=False)) == []
    assert found(tmp_path / "steady", longer(1), longer(1)) == []


def test_harder_tasks_that_need_more_words_are_no_hint(tmp_path):
    """Longer runs are paid more across groups, and not within any."""

    def went(factor):
        return lambda group, run: {"tokens": factor * (10 + 10 * group), "reward": float(group)}

    assert found(tmp_path, went(1), went(3)) == []


@pytest.mark.parametrize("what, said", [("cut_off", "had a call cut off at its token limit"), ("failed", "failed")])
def test_a_share_of_runs_that_rises_where_it_is_paid_is_told(tmp_path, what, said):
    def went(share):
        return lambda group, run: {what: run >= 8 - share, "reward": float(run >= 8 - share)}

    [hint] = found(tmp_path / "paid", went(1), went(5))
    assert (
        found(
            tmp_path / "punished",
            lambda *it: went(1)(*it) | {"reward": -it[1]},
            lambda *it: went(5)(*it) | {"reward": -it[1]},
        )
        == []
    )
    assert f"at first 12% of rollouts {said}, at the end 62%" in hint


def test_one_answer_to_all_tasks_is_told_and_many_right_ones_are_not(tmp_path):
    def own(group, run):
        return {"ids": (group, run), "reward": float(run)}

    def same(group, run):
        return {"ids": (3, 4), "reward": 1.0}

    def right(group, run):
        return {"ids": (group,), "reward": 1.0}

    [said] = found(tmp_path / "same", own, same, groups=9)
    assert "100% of the last rollouts end with the same answer, in 9 tasks (for example, rollout 9/8/7" in said
    assert found(tmp_path / "right", own, right, groups=9) == []
    assert found(tmp_path / "few", own, same, groups=4) == [], "few tasks may have one answer"


def evaluation(step, success, n=200, temperature=None):
    return {
        "name": "x", "step": step, "temperature": temperature, "success": success, "n": n,
        "stderr": (success * (1 - success) / n) ** 0.5,
        "interval": wilson_interval(success, n), "counts_successes": True,
    }  # fmt: skip


def steady(group, run):
    return {"reward": float(run)}


@pytest.mark.parametrize(
    "after, n, told", [(0.4, 200, True), (0.5, 200, True), (0.7, 200, False), (0.49, 5, False)],
    ids=["falls", "stands", "rises", "too few tasks to say"],
)  # fmt: skip
def test_held_out_tasks_that_do_not_follow_the_training_batches_are_told(tmp_path, after, n, told):
    said = found(
        tmp_path, steady, steady, metrics=lambda step: {"success": 0.1 * step + 0.01 * (step % 2)},
        evaluations=[evaluation(0, 0.5, n), evaluation(9, after, n)],
    )  # fmt: skip
    assert bool(said) == told
    if told:
        assert (
            "the success of the training batches rose from 0.103 to 0.703, but on 200 held-out tasks it went" in said[0]
        )


@pytest.mark.parametrize(
    "before, after, n, told", [(1.0, 1.0, 50, False), (0.96, 0.96, 50, False), (0.0, 0.0, 5, False), (1.0, 0.7, 50, True)],
    ids=["all solved", "nearly all solved", "none of a few solved", "fewer solved"],
)  # fmt: skip
def test_held_out_tasks_that_could_not_rise_or_are_too_few_are_not_told(tmp_path, before, after, n, told):
    said = found(
        tmp_path, steady, steady, metrics=lambda step: {"success": 0.6 + 0.05 * step + 0.01 * (step % 2)},
        evaluations=[evaluation(0, before, n), evaluation(9, after, n)],
    )  # fmt: skip
    assert bool(said) == told


def test_held_out_tasks_are_compared_at_the_first_temperature(tmp_path):
    [said] = found(
        tmp_path, steady, steady, metrics=lambda step: {"success": 0.1 * step + 0.01 * (step % 2)},
        evaluations=[evaluation(0, 0.5), evaluation(9, 0.4), evaluation(10, 0.9, temperature=1.0)],
    )  # fmt: skip
    assert "on 200 held-out tasks it went from 0.5 to 0.4 " in said


def test_a_short_run_says_nothing(tmp_path):
    assert found(tmp_path, longer(1), longer(9), third=2) == []


def test_a_long_run_is_read_in_part(tmp_path):
    with run_of(tmp_path, [steady] * 9, size=2, groups=1) as store:
        asked = []
        store.rows = lambda query, values: asked.append(*values) or []
        hints(store, [(step, {"groups_with_contrast": 1.0}) for step in range(1, 100_001)], [])
    assert len(asked) == 100 and (min(asked), max(asked)) == (1, 100_000)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9), st.integers(0, 9)), min_size=40, max_size=80))
def test_a_correlation_is_between_one_and_minus_one_and_turns_with_the_reward(runs):
    shapes = [shape(group=f"g{group}", reward=float(reward), tokens=tokens) for group, reward, tokens in runs]
    turned = [it._replace(reward=-it.reward) for it in shapes]
    one, other = (within_groups(it, lambda run: run.sampled_tokens) for it in (shapes, turned))
    assert -1 - 1e-9 <= one <= 1 + 1e-9 and one == pytest.approx(-other)


@pytest.mark.system
async def test_hints_of_a_run_with_a_hacked_reward_are_printed(tmp_path):
    counter = itertools.count(1)

    def longer_with_every_version(request):
        return "x" * (5 + next(counter) % 7 + 4 * engine.version)

    engine = FakeEngine(longer_with_every_version)

    def length(trajectory):
        return float(len(trajectory.output))

    given = settings(tmp_path, steps=9, reward=length, engine=engine, eval_tasks=["x"] * 20, eval_reward=lambda it: 0.0)
    result = await art.train(ScriptedAgent(), ["a", "b"], **given)
    hint, held_out = hints_of(tmp_path / "run", result.report)
    assert "sampled tokens per rollout went from" in hint and f"art view {tmp_path / 'run'}" in hint
    assert "the reward of the training batches rose" in held_out
    shown = io.StringIO()
    print_result(result, Console(file=shown, width=200), hints_of(result.run_dir, result.report))
    assert f"hint: {hint}" in shown.getvalue()


async def test_an_early_end_is_printed_with_its_reason(tmp_path):
    given = short(tmp_path, steps=9, reward=lambda trajectory: 1.0, max_flat_groups=4)
    result = await art.train(ScriptedAgent(), ["a"], **given)
    shown = io.StringIO()
    print_result(result, Console(file=shown, width=200), hints_of(result.run_dir, result.report))
    assert (
        "training ended after step 4: all rewards were equal within every group of the last 4 steps" in shown.getvalue()
    )
