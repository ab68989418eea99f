"""When training ends before its last step: the rules, and a run that they end in good order."""

import dataclasses
import random
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbered_runs import Numbers, lines, settings
from screens import Lines

import art_core as art
from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.loop.stopping import Fall, collapse, stop
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent

RISEN = [0.2 + 0.02 * (place % 30) for place in range(30)]


def scattered(means, scatter=0.08, seed=0):
    return list(np.asarray(means) + np.random.default_rng(seed).normal(0, scatter, len(means)))


def test_a_fall_that_stays_is_a_collapse_within_a_window_and_tells_both_means():
    rewards = scattered([*RISEN, *[0.05] * 10])
    fall = collapse(rewards, 10)
    assert fall == Fall(pytest.approx(np.mean(rewards[20:30])), pytest.approx(np.mean(rewards[-10:])))
    assert not any(collapse(rewards[:end], 10) for end in range(31))


def test_a_single_bad_step_a_plateau_and_a_dip_are_none():
    for rewards in ([*RISEN, -5.0], [*RISEN, *[0.7] * 200], [*RISEN, *[0.6] * 30], [1.0] * 30 + [0.95] * 30):
        rewards = scattered(rewards)
        assert not any(collapse(rewards[:end], 10) for end in range(len(rewards) + 1))


def test_a_fall_from_a_plateau_without_any_scatter_is_one_only_where_it_is_large():
    assert collapse([1.0] * 20 + [0.5] * 10, 10)
    assert not collapse([1.0] * 20 + [0.95] * 10, 10)


@given(
    st.lists(st.integers(-1000, 1000), min_size=4, max_size=60), st.integers(2, 12), st.sampled_from([0.25, 2.0, 64.0])
)
def test_a_collapse_is_one_in_any_unit_of_the_reward_and_never_a_rise(rewards, window, unit):
    found = collapse(rewards, window)
    assert bool(collapse([unit * it for it in rewards], window)) == bool(found)
    if found:
        assert found.last < found.best and len(rewards) >= 2 * window
        best = max(np.convolve(rewards, np.full(window, 1 / window), "valid")[:-window])
        assert found.best == pytest.approx(best)


@given(st.lists(st.integers(-1000, 1000), max_size=60))
def test_rewards_that_never_fall_never_collapse(rewards):
    assert not collapse(sorted(rewards), 5)


def test_noise_alone_does_not_end_a_long_run():
    rng = np.random.default_rng(1)
    for _ in range(5):
        rewards = list(rng.normal(0.0, 1.0, 400))
        assert not any(collapse(rewards[:end], 10) for end in range(len(rewards) + 1))


def guards(**given):
    return TrainConfig(**given), []


def step(contrast=1.0, reward=0.5, **more):
    return {"groups_with_contrast": contrast, "groups_sampled": 2.0, "reward": reward, **more}


def fed(guard, *metrics, since=0):
    config, steps = guard
    steps += metrics
    found = stop(steps, config, since=since)
    return found and found.reason


@pytest.mark.parametrize("name, setting", [("logprob_gap", "max_logprob_gap"), ("kl_ref", "max_kl")])
def test_a_metric_out_of_bounds_ends_a_run_after_three_steps_in_a_row(name, setting):
    over, under = step(**{name: 0.7}), step(**{name: 0.5})
    bound = {setting: 0.6, "kl": 0.1}
    assert fed(guards(**bound), over, over, under, over, over) is None
    reason = fed(guards(**bound), over, over, step(contrast=0.0), over)
    assert f"{setting}=0.6" in reason and "now 0.7" in reason
    assert "now nan" in fed(guards(**bound), *[step(**{name: float("nan")})] * 3)
    assert fed(guards(**{setting: None, "kl": 0.1}), *[over] * 9) is None


def test_a_reward_whose_metric_has_the_name_of_a_bound_is_not_taken_for_it():
    assert fed(guards(), *[step(logprob_gap=9.0, **{"learner/logprob_gap": 0.0})] * 5) is None


def test_steps_without_contrast_end_a_run_when_there_are_too_many_and_say_which_way_the_reward_went():
    flat = [step(contrast=0.0, reward=-0.2)] * 4
    assert fed(guards(max_flat_groups=9), *flat) is None
    fell = fed(guards(max_flat_groups=8), step(reward=0.3), *flat)
    assert "of the last 4 steps, in 8 groups, so nothing" in fell
    assert "(mean reward -0.2, before that 0.3)" in fell and "lower learning_rate" in fell
    assert "harder tasks" in fed(guards(max_flat_groups=8), *flat)
    assert fed(guards(max_flat_groups=None), *flat * 20) is None
    assert fed(guards(max_flat_groups=8), *flat[1:], step(), *flat[1:]) is None, "not in a row"


def test_steps_in_which_nothing_could_be_scored_are_not_flat():
    unscored, unscored_ends = {"groups_with_contrast": 0.0, "groups_sampled": 2.0}, {"max_unscored_steps": None}
    flat = step(contrast=0.0)
    assert fed(guards(max_flat_groups=6, **unscored_ends), *[unscored] * 9, flat, flat) is None
    assert "of the last 3 steps" in fed(guards(max_flat_groups=6, **unscored_ends), flat, *[unscored] * 9, flat, flat)


def test_a_run_of_one_task_a_step_that_is_seldom_solved_does_not_end_by_chance():
    rng = np.random.default_rng(0)
    for _ in range(20):
        solved = rng.random((500, 8)) < 0.01
        rates = solved.mean(axis=1)
        steps = [step(contrast=float(0 < it < 1), reward=it, groups_sampled=1.0) for it in rates]
        guard = guards(collapse_steps=None)
        assert not any(fed(guard, it) for it in steps)


def test_a_collapse_of_the_rewards_of_single_calls_counts_where_only_these_are_given():
    def of_calls(values):
        return [step(reward=0.0, call_reward=it) for it in values]

    assert "has collapsed" in fed(guards(), *of_calls([*RISEN, *[0.0] * 10]))
    assert fed(guards(collapse_steps=None), *of_calls([*RISEN, *[0.0] * 10])) is None


def test_supervised_steps_say_nothing():
    imitated = {"reward": -9.0, "nll": 1.0}
    assert fed(guards(), *[step(reward=it) for it in RISEN], *[imitated] * 30) is None


def test_a_run_that_goes_on_after_an_early_end_is_judged_by_its_new_steps():
    history = [*map(lambda it: step(reward=it), RISEN), *[step(reward=0.0)] * 10]
    assert fed(guards(), *history)
    assert fed(guards(), *history, *[step(reward=0.0)] * 9, since=40) is None
    assert fed(guards(), *history, *[step(reward=0.0)] * 10, since=40)
    assert fed(guards(), *history, *[step(reward=0.7)] * 20, since=40) is None, "it has recovered"


def test_a_bound_of_what_is_not_measured_is_refused():
    with pytest.raises(ConfigError, match="max_kl=1.0: the divergence .* is measured if kl= is above 0"):
        art.open_run(max_kl=1.0)


class Drifts(CountingLearner):
    """Its logprobs are ever further from those recorded, from one step on."""

    def step(self, trees, *, loss=None):
        return {**super().step(trees), "logprob_gap": 0.0 if self.version < 3 else 1.5}


@pytest.mark.system
@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_a_run_out_of_bounds_ends_in_good_order_and_goes_on_with_the_setting_that_it_names(
    tmp_path, max_staleness
):
    screen = Lines()
    common = {"steps": 12, "eval_tasks": ["x"], "max_staleness": max_staleness, "keep_checkpoints": None}
    result = await art.train(
        ScriptedAgent(), ["a", "b"], **settings(tmp_path, learner=Drifts(), progress=screen, **common)
    )
    report = result.report
    assert report["steps"] == 5 and report["stopped"]["step"] == 5 and report["after"]["n"] == 1
    assert any(f"training ends after step 5 of 12: {report['stopped']['reason']}" in line for line in screen.lines)
    assert "max_logprob_gap=1 nats" in report["stopped"]["reason"]
    assert (tmp_path / "run" / "checkpoints" / "step-000005").is_dir()
    more = await art.train(
        ScriptedAgent(), ["a", "b"], **settings(tmp_path, learner=Drifts(), max_logprob_gap=2.0, **common)
    )
    assert more.report["steps"] == 12 and more.report["stopped"] is None and len(lines(tmp_path)) == 12


@pytest.mark.system
async def test_flat_steps_of_before_an_interruption_count_and_those_of_before_an_early_end_do_not(tmp_path):
    async def train(steps):
        given = settings(tmp_path, steps=steps, max_flat_groups=10, reward=lambda trajectory: 1.0)
        return (await art.train(ScriptedAgent(), ["a"], **given)).report["steps"]

    assert [await train(3), await train(9), await train(9), await train(20)] == [3, 5, 9, 10]


@pytest.mark.system
async def test_a_reward_that_collapses_ends_a_run(tmp_path):
    def better_until_version_8(request):
        return str(int(numbers(request)) % 3 + (10 * engine.version if engine.version < 8 else 0))

    numbers, engine = Numbers(), FakeEngine(better_until_version_8)
    result = await art.train(
        ScriptedAgent(), ["a", "b"], **settings(tmp_path, steps=30, collapse_steps=4, engine=engine)
    )
    assert result.report["steps"] < 14 and "it has collapsed" in result.report["stopped"]["reason"]


@pytest.mark.parametrize(
    ("success", "rate", "said", "now"),
    [(0.0, 0.002, 1, "learning_rate= (now 0.002) or"), (0.0, None, 1, "learning_rate= or"), (1.0, 0.002, 0, "")],
)
async def test_a_policy_that_begins_to_answer_every_task_alike_is_reported_once_unless_it_is_right(
    tmp_path, success, rate, said, now
):
    def same_from_version_2(request):
        return "four" if engine.version >= 2 else numbers(request)

    def reward(trajectory):
        trajectory.metrics["success"] = success
        return random.random()

    numbers, engine, screen = Numbers(), FakeEngine(same_from_version_2), Lines()
    given = settings(tmp_path, steps=6, engine=engine, reward=reward, progress=screen, learning_rate=rate)
    await art.train(ScriptedAgent(), ["a", "b"], **given)
    assert [line["same_answer"] for line in lines(tmp_path)] == [0.125, 0.125, 1.0, 1.0, 1.0, 1.0]
    found = [line for line in screen.lines if "the policy has collapsed" in line]
    assert len(found) == said
    for line in found:
        assert line.startswith("100% of the answers of the last 2 steps are the same") and now in line


def test_the_settings_of_the_rules_are_documented_with_their_defaults(request):
    text = (request.config.rootpath / "docs" / "settings.md").read_text()
    names = ("max_flat_groups", "max_unscored_steps", "collapse_steps", "max_logprob_gap", "max_kl")
    defaults = {it.name: it.default for it in dataclasses.fields(TrainConfig)}
    rows = [line.split("|") for line in text.splitlines()]
    said = {row[1].strip(" `"): row[2].strip() for row in rows if len(row) > 3}
    assert [said[it] for it in names] == ["none" if defaults[it] is None else f"{defaults[it]:g}" for it in names]


@pytest.mark.system
async def test_a_run_goes_back_to_before_a_fall_where_its_later_checkpoints_are_deleted(tmp_path):
    common = {"steps": 8, "keep_checkpoints": None}
    first = await art.train(ScriptedAgent(), ["a", "b"], **settings(tmp_path, learner=Drifts(), **common))
    assert first.report["stopped"]["step"] == 5
    for step in (4, 5):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:06d}")
    screen = Lines()
    again = await art.train(ScriptedAgent(), ["a", "b"], **settings(tmp_path, progress=screen, **common))
    assert any("resuming after step 3" in line for line in screen.lines)
    assert again.report["steps"] == 8 and again.report["stopped"] is None
    assert [line.get("logprob_gap") for line in lines(tmp_path)] == [0, 0, 1.5, None, None, None, None, None]
