"""Groups without contrast are replaced by fresh tasks, for a limited number of rounds."""

import io

import pytest
from numbered_runs import lines, number, settings, stored
from rich.console import Console

import art_core as art
from art_core.loop.display import Display
from art_core.loop.tasks import batch_of_step, fresh_tasks
from art_core.testing import CountingLearner, ScriptedAgent


def flat_for(*tasks):
    """Return a reward that is the same for every rollout of ``tasks``."""
    return lambda trajectory: 0.0 if trajectory.task in tasks else number(trajectory)


@pytest.mark.system
@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_groups_without_contrast_are_replaced_by_fresh_tasks_and_stay_in_the_store(tmp_path, max_staleness):
    tasks = [f"task {i}" for i in range(12)]
    learner = CountingLearner()
    await art.train(
        ScriptedAgent(), tasks,
        **settings(
            tmp_path, tasks_per_step=3, group_size=2, reward=flat_for(*tasks[:6]), learner=learner, dynamic_sampling=True,
            max_staleness=max_staleness, max_extra_rounds=20,
        ),
    )  # fmt: skip
    assert [len(trees) for trees in learner.trees] == [3] * 4
    for line in lines(tmp_path):
        of_step = [rollout for rollout, _ in stored(tmp_path) if rollout.step == line["step"]]
        assert line["groups_with_contrast"] == 3 and line["groups_sampled"] == len({r.group for r in of_step})
        assert len({rollout.task for rollout in of_step}) == line["groups_sampled"], "a task was repeated too early"
        assert all(rollout.reward is not None for rollout in of_step)
    assert sum(line["groups_sampled"] for line in lines(tmp_path)) > 12


@pytest.mark.system
async def test_extra_rounds_end_and_the_end_is_shown_once(tmp_path):
    output = io.StringIO()
    learner = CountingLearner()
    await art.train(
        ScriptedAgent(), list("abcdefgh"),
        **settings(
            tmp_path, steps=2, learner=learner, reward=lambda trajectory: 1.0, dynamic_sampling=True, max_extra_rounds=3,
            progress=Display(console=Console(file=output, width=200)),
        ),
    )  # fmt: skip
    assert [line["groups_sampled"] for line in lines(tmp_path)] == [8, 8] and learner.version == 0
    assert output.getvalue().count("step 1: 0 of 2 groups have contrast after max_extra_rounds=3") == 1
    assert "step 2: 0 of" not in output.getvalue() and "groups with contrast 0 of 8" in output.getvalue()


@pytest.mark.system
async def test_a_resumed_run_draws_the_tasks_that_it_would_have_drawn(tmp_path):
    def tasks_of(folder):
        steps = {}
        for rollout, _ in stored(folder):
            steps.setdefault(rollout.step, {})[rollout.group] = rollout.task
        return {step: list(groups.values()) for step, groups in steps.items()}

    tasks = [f"task {i}" for i in range(9)]
    common = {"group_size": 2, "reward": flat_for(*tasks[::2]), "dynamic_sampling": True, "seed": 5}
    await art.train(ScriptedAgent(), tasks, **settings(tmp_path / "whole", **common))
    for steps in (2, 4):
        await art.train(ScriptedAgent(), tasks, **settings(tmp_path / "twice", steps=steps, **common))
    assert tasks_of(tmp_path / "twice") == tasks_of(tmp_path / "whole")


async def test_an_extra_round_in_which_every_rollout_fails_is_data(tmp_path):
    tasks = ["a", "b"]
    (first,) = batch_of_step(tasks, 0, art.TrainConfig(tasks_per_step=1))

    async def agent(task_input, address):
        if task_input != first:
            raise RuntimeError("before any call")
        return await ScriptedAgent()(task_input, address)

    more = {"steps": 1, "tasks_per_step": 1, "reward": lambda trajectory: 0.0, "dynamic_sampling": True}
    await art.train(agent, tasks, **settings(tmp_path, max_extra_rounds=1, **more))
    assert [(line["failed"], line["groups_sampled"]) for line in lines(tmp_path)] == [(4, 2)]


def test_fresh_tasks_never_end_depend_on_the_seed_and_start_with_other_tasks():
    config = art.TrainConfig(tasks_per_step=3, seed=2)
    tasks = list(range(8))
    drawn = fresh_tasks(tasks, 4, config)
    first = [next(drawn) for _ in range(16)]
    assert not set(first[:5]) & set(batch_of_step(tasks, 4, config)) and sorted(first[:8]) == tasks
    assert first[8:] == first[:8]
    again = fresh_tasks(tasks, 4, config)
    assert first == [next(again) for _ in range(16)]
    assert next(fresh_tasks(["only"], 0, art.TrainConfig())) == "only"
