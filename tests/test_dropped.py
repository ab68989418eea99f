"""A step with a value that is NaN or infinite: nothing changes, what it was given is kept, and training goes on."""

import json
import math
import pickle

import pytest
import torch
from numbered_runs import Numbers, lines, settings
from reward_fakes import unlike
from screens import Lines
from small_learner import live, make_learner, make_trees, save_model
from tree_cases import FORKED

import art_core as art
from art_core import losses
from art_core.errors import NotFiniteError
from art_core.store import Store
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent
from art_core.token_tree import build_tree
from art_core.types import LossOutputs


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


class BreaksAt:
    """GRPO, but for some of its calls, where ``broken`` makes something else of the outputs."""

    def __init__(self, broken, *calls):
        self.broken, self.calls, self.count = broken, calls, 0

    def __call__(self, inputs):
        self.count += 1
        outputs = losses.grpo(inputs)
        return self.broken(outputs) if self.count in self.calls else outputs


def no_number(outputs):
    return LossOutputs(outputs.loss * math.nan, outputs.metrics)


def no_number_beside_a_good_gradient(outputs):
    return LossOutputs(outputs.loss + math.nan, outputs.metrics)


def state(learner):
    """Everything that a step changes."""
    moments = [value.clone() for it in learner._optimizer.state.values() for value in it.values()]
    return [*live(learner).values(), *moments, torch.tensor(learner.version)]


@pytest.mark.parametrize("broken", [no_number, no_number_beside_a_good_gradient])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_step_without_a_finite_loss_leaves_weights_and_optimizer_to_the_bit(model_folder, broken, rank):
    learner = make_learner(model_folder, BreaksAt(broken, 2), lora_rank=rank)
    trees = make_trees(learner)
    learner.step(trees)
    before = state(learner)
    with pytest.raises(NotFiniteError, match="of step 2 is not finite") as raised:
        learner.step(trees)
    assert raised.value.found["values"]["loss"] == "nan"
    assert bool(raised.value.found["gradients"]) == (broken is no_number)
    assert all(torch.equal(old, new) for old, new in zip(before, state(learner), strict=True))
    again = make_learner(model_folder, lora_rank=rank)
    for it in (learner, again):
        it.step(trees)
    again.step(trees)
    assert all(torch.equal(old, new) for old, new in zip(state(learner), state(again), strict=True)), (
        "as if never asked"
    )


def test_the_gradients_that_broke_are_named(model_folder):
    learner = make_learner(model_folder)
    with pytest.raises(NotFiniteError) as raised:
        learner.step([build_tree(FORKED, [math.inf, 1.0, 1.0])])
    names = {name for name, it in learner.model.named_parameters() if it.requires_grad}
    assert set(raised.value.found["gradients"]) <= names and raised.value.found["gradients"]


def test_the_error_travels_between_processes():
    error = pickle.loads(pickle.dumps(NotFiniteError("step 1", {"values": {"loss": "nan"}})))
    assert str(error) == "step 1" and error.found == {"values": {"loss": "nan"}}


class Breaks(CountingLearner):
    """Finds in some steps, counted from 1, that the loss is not finite."""

    def __init__(self, *broken):
        super().__init__()
        self.asked, self.broken = 0, broken

    def step(self, trees, *, loss=None):
        self.asked += 1
        if self.asked in self.broken:
            raise NotFiniteError("the loss is not finite", {"values": {"loss": "nan"}})
        return super().step(trees)


@pytest.mark.system
async def test_a_dropped_step_is_no_update_is_said_and_kept_and_training_goes_on(tmp_path):
    engine, learner, screen = FakeEngine(Numbers()), Breaks(2), Told()
    result = await art.train(
        ScriptedAgent(), ["a", "b"], **settings(tmp_path, engine=engine, learner=learner, progress=screen)
    )
    run = tmp_path / "run"
    assert result.report["steps"] == 4 and result.report["stopped"] is None
    assert [line.get("dropped", 0) for line in lines(tmp_path)] == [0, 1, 0, 0]
    assert [weights.version for weights in engine.loaded] == [1, 2, 3]
    file = run / "dropped" / "step-000002.json"
    assert [str(file) in line for line in screen.lines].count(True) == 1
    kept = json.loads(file.read_text())
    assert (kept["step"], kept["version"], kept["not_finite"]) == (2, 1, {"values": {"loss": "nan"}})
    batch = {t.rollout_id: t for t in art.load_trajectories(run, step=2)}
    assert {it["rollout_id"]: it["reward"] for it in kept["rollouts"]} == {
        it.rollout_id: it.reward for it in batch.values()
    }
    with Store(run / "run.sqlite") as store:
        assert [update.step for update in store.updates()] == [1, 3, 4]


class Told(Lines):
    """Keeps what the engine's loggers say too, as a display on a terminal does."""

    def __init__(self):
        super().__init__()
        self.console.quiet = False


@pytest.mark.system
async def test_three_dropped_steps_in_a_row_end_training_and_two_do_not(tmp_path):
    result = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, steps=9, learner=Breaks(2, 3, 5, 6, 7)))
    assert result.report["steps"] == 7
    assert (
        result.report["stopped"]["step"] == 7 and "the last 3 steps were dropped" in result.report["stopped"]["reason"]
    )
    more = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, steps=9))
    assert more.report["steps"] == 9 and more.report["stopped"] is None


async def test_calls_whose_logprobs_are_no_numbers_reach_no_learner_and_are_named(tmp_path):
    """The door refuses such answers; these come from elsewhere."""
    learner, runs = CountingLearner(), []
    for at in range(2):
        call = art.types.Call((1, 2), (3, at), (math.nan, -1.0), request_id=f"q{at}")
        runs.append(art.Trajectory(task="t", calls=(call,), reward=float(at), rollout_id=f"r{at}"))
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=learner) as run:
        metrics = await run.learn([art.Group("t", tuple(runs))])
    assert learner.trees == [] and metrics["dropped"] == 1
    kept = json.loads((tmp_path / "run" / "dropped" / "step-000001.json").read_text())
    assert kept["not_finite"] == {"given": ["logprobs"], "calls": {"r0": ["q0"], "r1": ["q1"]}}


async def test_a_learner_that_has_stepped_all_the_same_is_not_gone_on_with(tmp_path):
    class Moved(CountingLearner):
        def step(self, trees, *, loss=None):
            super().step(trees)
            raise NotFiniteError("too late")

    with pytest.raises(NotFiniteError, match="too late"):
        await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, learner=Moved()))


@pytest.mark.system
async def test_a_reward_may_have_metrics_called_as_those_of_the_update(tmp_path):
    def reward(trajectory):
        trajectory.metrics.update(dropped=1.0, skipped=1.0, mismatch=9.0)
        return float(trajectory.output)

    result = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, steps=5, reward=reward))
    assert result.report["steps"] == 5
    assert lines(tmp_path)[0]["reward/dropped"] == 1 and "dropped" not in lines(tmp_path)[0]


@pytest.mark.system
async def test_a_loss_that_is_nan_for_one_step_of_the_model_that_ships(tmp_path):
    loss = BreaksAt(no_number, 2)

    async def step(run):
        groups = await run.collect(ScriptedAgent(max_tokens=6), ["Which city?"])
        return await run.learn(await run.score(groups, unlike))

    async with art.open_run(tmp_path / "run", model="tiny", loss=loss, group_size=4, max_context=256) as run:
        assert "dropped" not in await step(run)
        learner = await run.learner()
        before = state(learner)
        metrics = await step(run)
        assert metrics["dropped"] == 1 and "grad_norm" not in metrics and run.step == 2
        assert all(torch.equal(old, new) for old, new in zip(before, state(learner), strict=True))
        after = await step(run)
        assert learner.version == 2 and after["mismatch"] < 1e-3 and math.isfinite(after["grad_norm"])
    checkpoints = sorted(it.name for it in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints == ["step-000001", "step-000002", "step-000003"]
