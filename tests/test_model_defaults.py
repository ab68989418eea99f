"""Settings that depend on the model's size."""

import json

import pytest

import art_core as art
from art_core import hookimpl
from art_core.config import make_config
from art_core.loop.setup import Setup
from art_core.plugins import Plugins
from art_core.testing import CountingLearner, FakeEngine


def model_of(parameters, folder):
    """Write a folder of files that say how many weights they hold, and hold none."""
    shapes = {f"layer.{index}": {"shape": [parameters // 2, 1]} for index in range(2)}
    header = json.dumps({"__metadata__": {"format": "pt"}, **shapes}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.mark.parametrize(("parameters", "temperature"), [(900_000, 1.0), (135_000_000, 0.6), (1_500_000_000, 1.0)])
def test_small_pretrained_models_are_sampled_at_a_lower_temperature(parameters, temperature, tmp_path):
    model = model_of(parameters, tmp_path)
    assert Setup(tmp_path / "run", make_config({}, model=model)).config.temperature == temperature
    assert Setup(tmp_path / "run", make_config({"temperature": 0.9}, model=model)).config.temperature == 0.9


def test_the_size_of_a_hub_model_is_that_in_the_cache(tmp_path, monkeypatch):
    (tmp_path / "cached").mkdir()
    file = f"{model_of(135_000_000, tmp_path / 'cached')}/model.safetensors"
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, name: file)
    assert Setup(tmp_path / "run", make_config({}, model="some/model")).config.temperature == 0.6


def test_a_model_of_unknown_size_is_sampled_at_1(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert Setup(tmp_path / "run", make_config({}, model="some/model-that-no-hub-has")).config.temperature == 1.0


class Counting:
    @hookimpl
    def register_learners(self, register):
        register("counting", lambda model_folder, config, loss: CountingLearner())


@pytest.mark.parametrize(("passed", "falls"), [({}, 0), ({"steps": 40}, 10), ({"decay_steps": 5}, 5)])
async def test_the_learning_rate_falls_at_the_end_only_if_the_end_is_known(tmp_path, passed, falls):
    model = model_of(135_000_000, tmp_path)
    parts = {"engine": FakeEngine(), "learner": "counting", "plugins": Plugins(Counting())}
    async with art.open_run(tmp_path / "run", model=model, **parts, **passed) as run:
        assert run.config.decay_steps == falls
