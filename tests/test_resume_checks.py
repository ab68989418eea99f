"""A run's settings compared with those of its folder and of a learner object: what is refused, and what is logged."""

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


async def test_a_learner_that_serves_in_place_is_refused_if_rollouts_run_ahead(tmp_path):
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
        {"decay_steps": 2},
        {"max_grad_norm": 2.0},
        {"load_in_4bit": True},
    ],
)
async def test_a_learner_with_other_settings_than_the_run_is_refused_whichever_sets_them(tmp_path, setting):
    [name] = setting
    for own, passed in (({}, setting), (setting, {})):
        with pytest.raises(ConfigError, match=f"was made with {name}=.* and the run with {name}="):
            async with run_of(tmp_path, learner=Configured(TrainConfig(**own)), **passed):
                pass
    async with run_of(tmp_path, learner=Configured(TrainConfig(**setting)), **setting):
        pass


async def test_a_learner_whose_learning_rate_would_decay_over_other_steps_is_refused(tmp_path):
    learner = Configured(TrainConfig(decay_steps=2, steps=10))
    with pytest.raises(ConfigError, match="was made with steps=10 and the run with steps=30"):
        async with run_of(tmp_path, learner=learner, decay_steps=2, steps=30):
            pass


async def test_settings_that_may_not_reach_a_learner_without_config_are_logged(tmp_path, caplog):
    async with run_of(tmp_path, kl=0.1, group_size=4):
        assert "learner=CountingLearner(...) has no config, so these settings may not reach it: kl=0.1" in caplog.text


async def test_a_loss_that_does_not_reach_a_learner_object_is_logged_unless_the_learner_has_it(tmp_path, caplog):
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
async def test_a_folder_begun_with_other_settings_is_refused_unless_changes_are_allowed(tmp_path, changed):
    [(name, value)] = changed.items()
    begun = {name: getattr(TrainConfig(), name, "grpo")}
    async with run_of(tmp_path, **begun):
        pass
    async with run_of(tmp_path, max_concurrent=3, steps=7, checkpoint_every=2):
        pass  # settings that are not passed are not compared
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


async def test_a_users_loss_is_identified_by_its_source(tmp_path):
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


async def test_a_failed_start_does_not_begin_the_folder(tmp_path):
    class Broken(FakeEngine):
        async def start(self):
            raise ConfigError("no engine")

    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="no engine"):
        async with run_of(tmp_path, engine=Broken(), kl=0.2):
            pass
    async with run_of(tmp_path, kl=0.1):
        pass


async def test_a_setting_that_was_not_passed_at_first_may_be_set_by_later_training(tmp_path):
    """For example, imitation first, then GRPO in the same folder."""
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
