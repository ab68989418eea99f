"""A run's settings beside those of its folder and of a learner that is an object: what is refused and what is said."""

import functools

import pytest

import art_core as art
from art_core import losses
from art_core.config import TINY, TrainConfig
from art_core.errors import ConfigError
from art_core.learner import TorchLearner
from art_core.testing import CountingLearner, FakeEngine


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
        assert "learner=CountingLearner(...) has no config, so these may not reach it: kl=0.1" in caplog.text


async def test_a_loss_beside_a_learner_that_was_made_before_is_said_unless_it_has_it(tmp_path, caplog):
    clipped = functools.partial(losses.dapo, clip_high=0.3)
    async with run_of(tmp_path, loss="dapo", learner=Configured(TrainConfig(), clipped)):
        assert not caplog.text
    async with run_of(tmp_path / "other", loss=clipped):
        assert "loss=dapo(clip_high=0.3) is not handed to learner=CountingLearner(...)" in caplog.text


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
        {"loss": "dapo"},
    ],
)
async def test_what_changes_when_a_run_goes_on_is_said(tmp_path, caplog, changed):
    async with run_of(tmp_path):
        pass
    async with run_of(tmp_path):
        assert not caplog.text
    async with run_of(tmp_path, **changed):
        [(name, value)] = changed.items()
        assert f"was begun with {name}=" in caplog.text and f"goes on with {value}" in caplog.text


async def test_a_run_that_was_begun_before_a_setting_was_noted_goes_on_silently(tmp_path, caplog):
    async with run_of(tmp_path) as run:
        begun = run.store.meta("config")
        del begun["max_staleness"]
        run.store.set_meta("config", begun)
        run.store.set_meta("loss", None)
    async with run_of(tmp_path, max_staleness=1, loss="dapo", learner="torch"):
        assert not caplog.text
