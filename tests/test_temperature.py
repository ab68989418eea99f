"""The temperature of training rollouts: as it was chosen, or rising as a small pretrained model becomes sure of itself."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numbered_runs import lines, settings

import art_core as art
from art_core.config import TrainConfig, with_model_defaults
from art_core.errors import ConfigError
from art_core.loop.setup import Setup
from art_core.loop.temperature import temperature_after
from art_core.testing import CountingLearner, FakeEngine, ScriptedAgent

RISING = TrainConfig(temperature=0.6, max_temperature=1.0)


def after(*entropies, config=RISING):
    return temperature_after([{"entropy": entropy, "groups_with_contrast": 1.0} for entropy in entropies], config)


def test_it_rises_after_each_step_with_less_than_half_of_the_first_entropy():
    assert after() == after(0.4) == after(0.4, 0.4, 0.21) == 0.6
    assert after(0.4, 0.4, 0.19) == pytest.approx(0.65)
    assert after(0.4, 0.4, 0.19, 0.3, 0.1) == pytest.approx(0.7)
    assert after(0.4, 0.4, *[0.01] * 20) == 1.0


@given(st.lists(st.floats(0, 5), max_size=40))
def test_it_never_falls_and_stays_within_its_bounds(entropies):
    found = [after(*entropies[:count]) for count in range(len(entropies) + 1)]
    assert found == sorted(found) and found[0] >= 0.6 and found[-1] <= 1.0


def test_supervised_steps_do_not_count():
    steps = [{"entropy": 2.0}, {"entropy": 2.0}, *({"entropy": 0.4, "groups_with_contrast": 1.0} for _ in range(5))]
    assert temperature_after(steps, RISING) == 0.6


def test_a_temperature_that_was_passed_stays():
    assert after(0.4, 0.4, 0.01, config=TrainConfig(temperature=0.8, max_temperature=0.8)) == 0.8
    assert after(0.4, 0.4, 0.01, config=TrainConfig(temperature=0.8)) == 0.8


def folder_of(tmp_path, weights):
    """A model folder whose file of weights has this many, by its header."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [weights], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("weights", "passed", "temperature", "most", "decay"),
    [
        (100_000_000, {}, 0.6, 1.0, 10),
        (100_000_000, {"temperature": 0.7}, 0.7, 0.7, 10),
        (100_000_000, {"temperature": 0.7, "max_temperature": 0.9, "decay_steps": 0}, 0.7, 0.9, 0),
        (1_000_000, {}, 1.0, 1.0, 0),
        (7_000_000_000, {}, 1.0, 1.0, 0),
    ],
)
def test_the_defaults_depend_on_the_models_size(tmp_path, weights, passed, temperature, most, decay):
    config = with_model_defaults(TrainConfig(**passed), folder_of(tmp_path, weights))
    assert (config.temperature, config.max_temperature, config.decay_steps) == (temperature, most, decay)


def test_a_maximum_below_the_temperature_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="max_temperature=0.5 is below the temperature, 1; pass a higher one"):
        with_model_defaults(TrainConfig(max_temperature=0.5), folder_of(tmp_path, 1000))


async def test_the_recorded_decay_is_that_of_a_learner_object_not_the_models_default(tmp_path):
    model = folder_of(tmp_path, 100_000_000)
    (tmp_path / "config.json").write_text("{}")
    learner = CountingLearner()
    assert (
        Setup(tmp_path / "run", TrainConfig(model=model), engine=FakeEngine(), learner=learner).config.decay_steps == 0
    )
    assert Setup(tmp_path / "run", TrainConfig(model=model), engine=FakeEngine()).config.decay_steps == 10


class Surer(CountingLearner):
    """Its entropy halves from step to step."""

    def step(self, trees, *, loss=None):
        return {**super().step(trees), "entropy": 0.5**self.version}


async def test_a_run_samples_at_the_risen_temperature_and_a_resumed_one_goes_on_with_it(tmp_path):
    given = {"temperature": 0.6, "max_temperature": 1.0}
    await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, learner=Surer(), steps=4, **given))
    await art.train(ScriptedAgent(), ["a"], **settings(tmp_path, learner=Surer(), steps=6, **given))
    assert [round(line["temperature"], 2) for line in lines(tmp_path)] == [0.6, 0.6, 0.6, 0.65, 0.7, 0.75]
