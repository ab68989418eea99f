"""A run's settings beside those of its folder and of a learner that is an object: what is refused and what is said."""

import functools
import re

import pytest

import art_core as art
from art_core import losses
from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.learner import TorchLearner
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent
from art_embedded import TINY


def run_of(tmp_path, **settings):
    return art.open_run(tmp_path / "run", **{"engine": FakeEngine(), "learner": CountingLearner(), **settings})


class Configured(CountingLearner):
    def __init__(self, config, loss=losses.grpo):
        super().__init__()
        self.config, self.loss = config, loss


async def test_a_learner_that_serves_in_place_is_refused_where_rollouts_run_meanwhile(tmp_path):
    learner = TorchLearner(TINY, TrainConfig(), losses.grpo)
    with pytest.raises(
        ConfigError, match="TorchLearner was made with max_staleness=0 and the run with max_staleness=2"
    ):
        async with run_of(tmp_path, learner=learner, max_staleness=2):
            pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "setting",
    [
        {"kl": 0.1},
        {"importance_cap": 2.0},
        {"lora_rank": 4},
        {"learning_rate": 1e-3},
        {"max_tokens_per_pass": 100},
        {"warmup_steps": 0},
        {"max_grad_norm": 2.0},
        {"load_in_4bit": True},
    ],
)
async def test_settings_of_a_learner_that_differ_from_the_runs_are_refused_either_way(tmp_path, setting):
    [name] = setting
    for own, given in (({}, setting), (setting, {})):
        with pytest.raises(ConfigError, match=f"was made with {name}=.* and the run with {name}="):
            async with run_of(tmp_path, learner=Configured(TrainConfig(**own)), **given):
                pass
    async with run_of(tmp_path, learner=Configured(TrainConfig(**setting)), **setting):
        pass


async def test_settings_that_do_not_reach_a_learner_without_config_are_said(tmp_path, caplog):
    async with run_of(tmp_path, kl=0.1, group_size=4):
        assert "learner=CountingLearner(...) has no config, so these settings may not reach it: kl=0.1" in caplog.text


async def test_a_loss_beside_a_learner_that_was_made_before_is_said_unless_it_has_it(tmp_path, caplog):
    clipped = functools.partial(losses.dapo, clip_high=0.3)
    async with run_of(tmp_path, loss="dapo", learner=Configured(TrainConfig(), clipped)):
        assert not caplog.text
    async with run_of(tmp_path / "other", loss=clipped):
        assert "loss=dapo(clip_high=0.3) does not reach learner=CountingLearner(...)" in caplog.text


@pytest.mark.parametrize(
    "changed",
    [
        {"kl": 0.1},
        {"importance_cap": 2.0},
        {"overlong": "drop"},
        {"max_staleness": 1},
        {"dynamic_sampling": True},
        {"load_in_4bit": False},
        {"group_size": 4},
        {"max_grad_norm": 2.0},
        {"other_nodes": "policy"},
        {"loss": "dapo"},
    ],
)
async def test_a_folder_that_was_begun_with_other_settings_is_refused_unless_changes_are_allowed(tmp_path, changed):
    [(name, value)] = changed.items()
    begun = {name: getattr(TrainConfig(), name, "grpo")}
    async with run_of(tmp_path, **begun):
        pass
    async with run_of(tmp_path, max_concurrent=3, steps=7, checkpoint_every=2):
        pass  # what is left out is what it was
    with pytest.raises(ConfigError, match=rf"\n{name} +\S+ +{re.escape(str(value))}\n"):
        async with run_of(tmp_path, **changed):
            pass
    async with run_of(tmp_path, **changed, allow_changes=True) as run:
        [change] = run.store.meta("changes")
        assert change["step"] == 0 and change["changed"][name][1] == value
    async with run_of(tmp_path, **changed) as run:
        assert len(run.store.meta("changes")) == 1
    with pytest.raises(ConfigError, match="holds another experiment"):
        async with run_of(tmp_path, **begun):
            pass


async def test_a_loss_of_ones_own_is_known_by_its_source(tmp_path):
    def loss(inputs):
        return losses.grpo(inputs)

    mine = loss

    def loss(inputs):
        return losses.dapo(inputs)

    async with run_of(tmp_path, loss=mine):
        pass
    async with run_of(tmp_path, loss=mine):
        pass
    with pytest.raises(ConfigError, match=r"\nloss +loss \(source \w+\) +loss \(source \w+\)\n"):
        async with run_of(tmp_path, loss=loss):
            pass


async def test_a_start_that_failed_begins_nothing(tmp_path):
    class Broken(FakeEngine):
        async def start(self):
            raise ConfigError("no engine")

    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="no engine"):
        async with run_of(tmp_path, engine=Broken(), kl=0.2):
            pass
    async with run_of(tmp_path, kl=0.1):
        pass


async def test_what_was_left_out_at_first_may_be_set_by_the_training_that_follows(tmp_path):
    """Such as imitation first, and GRPO in the same folder."""
    async with run_of(tmp_path) as run:
        assert run.store.meta("config")["learning_rate"] is None
    await art.train(
        ScriptedAgent(), ["a"], model="tiny", steps=1, group_size=2, tasks_per_step=1, learning_rate=1e-3, engine=FakeEngine(),
        learner=CountingLearner(), run_dir=tmp_path / "run", reward=lambda trajectory: 1.0, progress=False,
    )  # fmt: skip
    async with run_of(tmp_path) as run:
        assert run.store.meta("config")["learning_rate"] == 1e-3 and run.store.meta("changes") is None
    with pytest.raises(ConfigError, match="group_size +2 +8"):
        async with run_of(tmp_path, group_size=8):
            pass
