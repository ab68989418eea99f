"""A step with a value that is NaN or infinite changes nothing; its rollouts are listed, and training continues."""

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
    """GRPO, but ``broken`` replaces the outputs of some of its calls, counted from 1."""

    def __init__(self, broken, *calls):
        self.broken, self.calls, self.count = broken, calls, 0

    def __call__(self, inputs):
        self.count += 1
        outputs = losses.grpo(inputs)
        return self.broken(outputs) if self.count in self.calls else outputs


def nan_loss(outputs):
    return LossOutputs(outputs.loss * math.nan, outputs.metrics)


def nan_loss_with_a_finite_gradient(outputs):
    return LossOutputs(outputs.loss + math.nan, outputs.metrics)


def state(learner):
    """Everything that a step changes."""
    moments = [value.clone() for it in learner._optimizer.state.values() for value in it.values()]
    return [*live(learner).values(), *moments, torch.tensor(learner.version)]


@pytest.mark.parametrize("broken", [nan_loss, nan_loss_with_a_finite_gradient])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_step_without_a_finite_loss_leaves_weights_and_optimizer_unchanged(model_folder, broken, rank):
    learner = make_learner(model_folder, BreaksAt(broken, 2), lora_rank=rank)
    trees = make_trees(learner)
    learner.step(trees)
    before = state(learner)
    with pytest.raises(NotFiniteError, match="of step 2 is not finite") as raised:
        learner.step(trees)
    assert raised.value.details["values"]["loss"] == "nan"
    assert bool(raised.value.details["gradients"]) == (broken is nan_loss)
    assert all(torch.equal(old, new) for old, new in zip(before, state(learner), strict=True))
    other = make_learner(model_folder, lora_rank=rank)
    for stepping in (learner, other, other):
        stepping.step(trees)
    same = (torch.equal(old, new) for old, new in zip(state(learner), state(other), strict=True))
    assert all(same), "as if the step had never been requested"


def test_gradients_that_are_not_finite_are_named(model_folder):
    learner = make_learner(model_folder)
    with pytest.raises(NotFiniteError) as raised:
        learner.step([build_tree(FORKED, [math.inf, 1.0, 1.0])])
    names = {name for name, it in learner.model.named_parameters() if it.requires_grad}
    assert set(raised.value.details["gradients"]) <= names and raised.value.details["gradients"]


def test_the_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(NotFiniteError("step 1", {"values": {"loss": "nan"}})))
    assert str(error) == "step 1" and error.details == {"values": {"loss": "nan"}}


class Breaks(CountingLearner):
    """In some steps, counted from 1, the loss is not finite."""

    def __init__(self, *broken):
        super().__init__()
        self.requested, self.broken = 0, broken

    def step(self, trees, *, loss=None):
        self.requested += 1
        if self.requested in self.broken:
            raise NotFiniteError("the loss is not finite", {"values": {"loss": "nan"}})
        return super().step(trees)


@pytest.mark.system
async def test_a_dropped_step_is_reported_and_listed_and_training_continues(tmp_path):
    engine, learner, screen = FakeEngine(Numbers()), Breaks(2), EngineLines()
    result = await art.train(
        ScriptedAgent(), ["a", "b"], **settings(tmp_path, engine=engine, learner=learner, progress=screen)
    )
    run = tmp_path / "run"
    assert result.report["steps"] == 4 and result.report["stopped"] is None
    assert [line.get("dropped", 0) for line in lines(tmp_path)] == [0, 1, 0, 0]
    assert [weights.version for weights in engine.loaded] == [1, 2, 3]
    file = run / "dropped" / "step-000002.json"
    assert [str(file) in line for line in screen.lines].count(True) == 1
    content = json.loads(file.read_text())
    assert (content["step"], content["version"], content["not_finite"]) == (2, 1, {"values": {"loss": "nan"}})
    rewards = {t.rollout_id: t.reward for t in art.load_trajectories(run, step=2)}
    assert {rollout["rollout_id"]: rollout["reward"] for rollout in content["rollouts"]} == rewards
    with Store(run / "run.sqlite") as store:
        assert [update.step for update in store.updates()] == [1, 3, 4]


class EngineLines(Lines):
    """Keeps the engine's messages too."""

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


async def test_calls_with_nan_logprobs_are_named_and_not_trained(tmp_path):
    """The capture server refuses such answers; these calls are made by hand."""
    learner, trajectories = CountingLearner(), []
    for at in range(2):
        call = art.types.Call((1, 2), (3, at), (math.nan, -1.0), request_id=f"q{at}")
        trajectories.append(art.Trajectory(task="t", calls=(call,), reward=float(at), rollout_id=f"r{at}"))
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), learner=learner) as run:
        metrics = await run.learn([art.Group("t", tuple(trajectories))])
    assert learner.trees == [] and metrics["dropped"] == 1
    content = json.loads((tmp_path / "run" / "dropped" / "step-000001.json").read_text())
    assert content["not_finite"] == {"inputs": ["logprobs"], "calls": {"r0": ["q0"], "r1": ["q1"]}}


async def test_a_learner_that_steps_and_then_raises_ends_the_run(tmp_path):
    class Moved(CountingLearner):
        def step(self, trees, *, loss=None):
            super().step(trees)
            raise NotFiniteError("too late")

    with pytest.raises(NotFiniteError, match="too late"):
        await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, learner=Moved()))


@pytest.mark.system
async def test_a_reward_may_have_metrics_with_the_names_of_the_updates(tmp_path):
    def reward(trajectory):
        trajectory.metrics.update(dropped=1.0, skipped=1.0, mismatch=9.0, entropy=9.0, logprob_gap=9.0, kl_ref=9.0)
        return float(trajectory.output)

    result = await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, steps=5, reward=reward))
    assert result.report["steps"] == 5
    assert lines(tmp_path)[0]["reward/dropped"] == 1 and "dropped" not in lines(tmp_path)[0]
    assert lines(tmp_path)[0]["reward/entropy"] == 9 and "entropy" not in lines(tmp_path)[0]


@pytest.mark.system
async def test_a_nan_loss_in_one_step_of_the_tiny_model(tmp_path):
    loss = BreaksAt(nan_loss, 2)

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
