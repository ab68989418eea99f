"""Checkpoints of TorchLearner: they continue bit for bit, are whole or absent, and damage is named."""

import json
import os
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from small_learner import live, make_learner, make_trees, save_model
from tree_cases import make_model

from art_core.config import parameter_count
from art_core.errors import StoreError


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("rank", [0, 2])
def test_a_restored_learner_continues_bit_for_bit(model_folder, tmp_path, rank):
    learner = make_learner(model_folder, lora_rank=rank, kl=0.1)
    trees = make_trees(learner)
    for _ in range(2):
        learner.step(trees)
    learner.save(tmp_path / "checkpoint")
    drawn = torch.rand(3)
    for _ in range(2):
        learner.step(trees)
    other = make_learner(model_folder, lora_rank=rank, kl=0.1, seed=99)
    memory = {name: tensor.data_ptr() for name, tensor in other.weights().live.items()}
    other.restore(tmp_path / "checkpoint")
    assert other.version == 2
    assert torch.equal(torch.rand(3), drawn)
    for _ in range(2):
        other.step(trees)
    assert all(torch.equal(live(other)[name], tensor) for name, tensor in live(learner).items())
    assert memory == {name: tensor.data_ptr() for name, tensor in other.weights().live.items()}


def test_a_saved_folder_is_a_model_folder(model_folder, tmp_path):
    learner = make_learner(model_folder)
    learner.step(make_trees(learner))
    learner.save(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "tokenizer.json").read_text() == "{}"
    again = make_learner(tmp_path / "checkpoint")
    assert all(torch.equal(live(again)[name], tensor) for name, tensor in live(learner).items())
    assert parameter_count(str(tmp_path / "checkpoint")) == parameter_count(str(model_folder))
    again.save(tmp_path / "next")
    assert not (tmp_path / "next" / "optimizer.safetensors").exists()


def test_an_optimizer_under_its_earlier_name_is_read(model_folder, tmp_path):
    learner = make_learner(model_folder)
    learner.step(make_trees(learner))
    learner.save(folder := tmp_path / "checkpoint")
    (folder / "optimizer.state").rename(folder / "optimizer.safetensors")
    manifest = (folder / "learner.json").read_text()
    (folder / "learner.json").write_text(manifest.replace("optimizer.state", "optimizer.safetensors"))
    other = make_learner(model_folder)
    other.restore(folder)
    for each in (learner, other):
        each.step(make_trees(each))
    assert all(torch.equal(live(other)[name], tensor) for name, tensor in live(learner).items())


@pytest.mark.parametrize("sampling", [{"temperature": 0.9, "top_p": 0.6}, {"do_sample": False, "temperature": 0.6}])
def test_a_model_whose_sampling_values_lack_do_sample_is_saved(model_folder, tmp_path, sampling):
    own = shutil.copytree(model_folder, tmp_path / "model")
    (own / "generation_config.json").write_text(json.dumps(sampling))
    make_learner(own).save(tmp_path / "checkpoint")
    saved = json.loads((tmp_path / "checkpoint" / "generation_config.json").read_text())
    assert saved["do_sample"] and saved["temperature"] == sampling["temperature"]


def test_nothing_in_a_checkpoint_needs_unpickling(model_folder, tmp_path):
    learner = make_learner(model_folder, lora_rank=2)
    learner.step(make_trees(learner))
    learner.save(tmp_path / "checkpoint")
    files = {str(file.relative_to(tmp_path / "checkpoint")) for file in (tmp_path / "checkpoint").rglob("*.*")}
    assert {"learner.json", "optimizer.state", "adapter/adapter_model.safetensors"} <= files
    assert {file.rpartition(".")[2] for file in files} <= {"json", "safetensors", "md", "state"}
    assert json.loads((tmp_path / "checkpoint" / "learner.json").read_text())["base_model"] == str(model_folder)


def test_saving_again_replaces_the_folder_as_a_whole(model_folder, tmp_path):
    learner = make_learner(model_folder)
    learner.save(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "stray").touch()
    learner.step(make_trees(learner))
    learner.save(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert not (tmp_path / "checkpoint" / "stray").exists()
    learner.restore(tmp_path / "checkpoint")
    assert learner.version == 1


def test_a_save_that_fails_leaves_the_earlier_checkpoint(model_folder, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    learner = make_learner(model_folder)
    learner.save(tmp_path / "checkpoint")
    with monkeypatch.context() as patched, pytest.raises(StoreError, match=r"couldn't be written.*No space left"):
        patched.setattr("art_core.learner.checkpoint.save_file", full)
        learner.save(tmp_path / "checkpoint")
    learner.restore(tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_checkpoint_is_on_the_disk_before_it_takes_its_place(model_folder, tmp_path, monkeypatch):
    before, after = set(), set()

    def note(descriptor):
        (after if (tmp_path / "checkpoint").exists() else before).add(os.fstat(descriptor).st_ino)

    learner = make_learner(model_folder, lora_rank=2)
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", note)
        learner.save(tmp_path / "checkpoint")
    written = [tmp_path / "checkpoint", *(tmp_path / "checkpoint").rglob("*")]
    assert {path.stat().st_ino for path in written} <= before
    assert after == {tmp_path.stat().st_ino}


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("damage", [flip_a_bit, cut, lambda file: file.unlink()])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.state", "learner.json", "config.json"])
def test_a_damaged_file_is_named(model_folder, tmp_path, name, damage):
    learner = make_learner(model_folder)
    learner.save(tmp_path / "checkpoint")
    damage(tmp_path / "checkpoint" / name)
    with pytest.raises(StoreError, match=name):
        make_learner(model_folder).restore(tmp_path / "checkpoint")


@pytest.mark.parametrize("damage", [flip_a_bit, cut, lambda file: file.unlink()])
def test_the_message_about_a_damaged_checkpoint_says_that_a_resumed_run_skips_it(model_folder, tmp_path, damage):
    learner = make_learner(model_folder)
    learner.save(tmp_path / "checkpoint")
    damage(tmp_path / "checkpoint" / "model.safetensors")
    with pytest.raises(StoreError, match="a resumed run skips this checkpoint"):
        learner.restore(tmp_path / "checkpoint")


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_has_every_weight_though_all_lie_in_one_piece_of_memory(tmp_path, tied):
    make_model("qwen3", tie_word_embeddings=tied).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    learner = make_learner(tmp_path / "model")
    learner.save(tmp_path / "checkpoint")
    names = [load_file(tmp_path / folder / "model.safetensors").keys() for folder in ("model", "checkpoint")]
    assert names[0] == names[1] and ("lm_head.weight" in names[1]) is not tied


def test_a_checkpoint_of_another_kind_is_refused(model_folder, tmp_path):
    kinds = {rank: partial(make_learner, model_folder, lora_rank=rank) for rank in (0, 2, 3)}
    for rank, make in kinds.items():
        make().save(tmp_path / str(rank))
    for rank, other in [(0, 2), (2, 0), (2, 3)]:
        with pytest.raises(StoreError, match="lora_rank"):
            kinds[rank]().restore(tmp_path / str(other))
