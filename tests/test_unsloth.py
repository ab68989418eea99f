"""learner="unsloth": the torch learner's steps through a model that Unsloth loads; and when "auto" takes it.

Importing Unsloth changes transformers for the whole process, so everything that does runs in a child process.
"""

import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path

import pytest
import warm
from tree_cases import make_model

import art_core as art
from art_core import builtin
from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.learner import unsloth
from art_core.losses import grpo
from art_embedded import TINY

CHILD = Path(__file__).parent / "unsloth_child.py"
FAMILIES = ["llama", "qwen2", "qwen3", "mistral with a window", "gemma3 with a window", "qwen3-moe"]


@pytest.fixture
def in_child(tmp_path, monkeypatch):
    """Runs unsloth_child.py in a process with torch loaded, and returns the JSON of its last line."""

    def run(*arguments, **environment):
        path = os.pathsep.join([*map(str, (CHILD.parent.parent, CHILD.parent)), os.environ.get("PYTHONPATH", "")])
        for name, value in {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path, **environment}.items():
            monkeypatch.setenv(name, value)
        code = f"__file__ = {str(CHILD)!r}\n{CHILD.read_text()}"
        with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
            started = warm.program(code, arguments, cwd=tmp_path, stdout=out.fileno(), stderr=err.fileno())
            status = started.wait(200)
        printed, said = ((tmp_path / name).read_text() for name in ("out", "err"))
        assert status == 0, said[-3000:]
        assert len(printed.splitlines()) == 1, f"Unsloth printed: {printed}"
        return json.loads(printed) | {"said": said}

    return run


@pytest.fixture
def usable(monkeypatch):
    monkeypatch.setattr(unsloth, "missing", lambda: "")
    monkeypatch.setenv("UNSLOTH_ALLOW_CPU", "1")


def test_auto_is_the_torch_learner_if_unsloth_is_not_installed(monkeypatch, caplog):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "unsloth" else find(name))
    with caplog.at_level("INFO", "art_core.learner"):
        learner = builtin.auto_learner(str(TINY), TrainConfig(lora_rank=4), grpo)
    assert type(learner).__name__ == "TorchLearner"
    assert "takes torch: unsloth is not installed; run: pip install unsloth" in caplog.text


def test_auto_leaves_a_machine_without_a_gpu_to_torch_unless_opted_in(usable, monkeypatch):
    assert unsloth.why_not(str(TINY), TrainConfig(lora_rank=4)) == ""
    monkeypatch.delenv("UNSLOTH_ALLOW_CPU")
    assert "there is no GPU" in unsloth.why_not(str(TINY), TrainConfig(lora_rank=4))


def test_auto_leaves_models_that_train_all_their_weights_to_torch(usable):
    assert "lora_rank=0" in unsloth.why_not(str(TINY), TrainConfig(lora_rank=0))
    assert "trains all its weights" in unsloth.why_not(str(TINY), TrainConfig())


def test_auto_leaves_other_families_and_unreadable_models_to_torch(usable, tmp_path):
    assert "could not be read" in unsloth.why_not(str(tmp_path), TrainConfig(lora_rank=4))
    make_model("bloom").save_pretrained(tmp_path)
    assert "models of type 'bloom'" in unsloth.why_not(str(tmp_path), TrainConfig(lora_rank=4))


def test_unsloth_asked_for_and_not_installed_says_how_to_get_it(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "unsloth" else find(name))
    with pytest.raises(ConfigError, match="not installed; run: pip install unsloth, or use learner='torch'"):
        builtin.unsloth_learner(str(TINY), TrainConfig(), grpo)


async def test_unsloth_that_cannot_run_here_is_refused_before_a_run_folder_is_made(monkeypatch, tmp_path):
    monkeypatch.setattr(unsloth, "installed", lambda: False)
    with pytest.raises(ConfigError, match="unsloth is not installed"):
        async with art.open_run(tmp_path / "run", learner="unsloth"):
            pass
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("version", "enough"),
    [
        ("2026.11.1rc1", True),
        ("2026.10.9.post2", True),
        ("2026.11rc1", True),
        ("2026.10.9+cpu", True),
        ("2026.10.8rc9", False),
        ("unknown", False),
    ],
)
def test_versions_of_candidates_and_builds_are_understood(monkeypatch, version, enough):
    monkeypatch.setattr(unsloth, "installed", lambda: True)
    monkeypatch.setattr(unsloth, "has_gpu", lambda: False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert (unsloth.missing() == "") is enough


def test_four_bits_are_refused_by_the_torch_learner():
    with pytest.raises(ConfigError, match="needs learner='unsloth'"):
        builtin.torch_learner(str(TINY), TrainConfig(load_in_4bit=True), grpo)


@pytest.mark.engines
def test_gradients_agree_with_the_torch_learners(in_child, tmp_path):
    for family, found in in_child("gradients", ",".join(FAMILIES), tmp_path)["families"].items():
        assert found["error"] < 1e-4 and found["gradients"] > 0, (family, found)
        assert found["passes"] == 1, f"the tree of {family} must go through in one pass"


@pytest.mark.engines
def test_a_model_that_forgets_its_mask_trains_one_row_per_path_and_says_so(in_child, tmp_path):
    found = in_child("paths", "llama", tmp_path)
    assert found["error"] < 1e-4 and found["passes"] > 1
    assert "cannot follow a token tree (its logprobs differ by" in found["said"]


@pytest.mark.engines
def test_a_step_changes_the_weights_and_a_checkpoint_continues_to_the_bit(in_child, tmp_path):
    found = in_child("steps", "qwen3", tmp_path)
    assert found["changed"] > 0 and found["after_restore"] == 0
    assert found["adapter_merged_by_peft"] < 1e-6


@pytest.mark.engines
def test_a_run_trains_with_unsloth_and_its_engine_serves_the_merged_weights(in_child, tmp_path):
    found = in_child("train", "tiny", tmp_path, UNSLOTH_ALLOW_CPU="1")
    assert found["unsloth"] and "learner='auto' takes unsloth" in found["said"]
    assert found["grad_norms"][0] > 0
    assert len(found["gaps"]) == 3 and all(gap < 1e-4 for gap in found["gaps"])


@pytest.mark.engines
def test_whole_weights_and_four_bits_without_a_gpu_are_refused(in_child, tmp_path):
    found = in_child("refusals", "tiny", tmp_path)
    assert "lora_rank=16" in found["whole"] and "needs a GPU" in found["four_bits"]


@pytest.mark.engines
def test_the_torch_learner_and_the_engine_work_in_a_process_with_unsloth(in_child, tmp_path):
    found = in_child("together", "qwen3", tmp_path)
    assert found["torch_learner"] < 1e-6 and found["engine"] < 1e-4
