"""A learner on two processes takes the steps of one: replicated (DDP) or sharded (FSDP2), by gloo on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learner_processes import trees_of_step
from safetensors.torch import load_file
from tree_cases import make_model

from art_core.packing import shares

ROOT = Path(__file__).parent.parent
STEPS = [0, 1, 2, 3, 4]
SETTINGS = {
    "all weights": {"lora_rank": 0},
    "lora": {"lora_rank": 4},
    "kl, all weights": {"lora_rank": 0, "kl": 0.1},
    "kl, lora": {"lora_rank": 4, "kl": 0.1},
    "capped importance": {"lora_rank": 0, "importance_cap": 2.0},
    "many passes": {"lora_rank": 0, "max_tokens_per_pass": 20},
}
FAST = ("all weights", "kl, lora")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen3").save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def take_steps(folder, model, settings, *, sharding="none", steps=STEPS, restore=None):
    """Run a job in processes of its own and return its metrics."""
    folder.mkdir()
    job = {"model": str(model), "settings": settings, "sharding": sharding, "steps": steps, "restore": restore}
    (folder / "job.json").write_text(json.dumps(job))
    size = 1 if sharding == "none" else 2
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    children = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "learner_processes.py"), str(folder), str(rank), str(size)],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said = [child.communicate(timeout=200)[1] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0] * size, "\n".join(it[-3000:] for it in said)
    return json.loads((folder / "metrics.json").read_text())


def tensors(folder):
    return {
        f"{file.relative_to(folder)}:{name}": tensor
        for file in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if not name.startswith("random/")
    }


def check_same(one, two):
    """The same names, and values within 1e-5; the optimizer's moments too."""
    mine, theirs = tensors(one / "checkpoint"), tensors(two / "checkpoint")
    assert mine.keys() == theirs.keys() and len(mine) > 10
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name} {text}")
    published = tensors(two / "published")
    assert published and all(torch.equal(theirs[name], tensor) for name, tensor in published.items())
    files = [sorted(str(it.relative_to(folder)) for it in folder.rglob("*")) for folder in (one, two)]
    assert [it for it in files[0] if it != "meeting"] == [it for it in files[1] if it != "meeting"]


def check_same_metrics(one, two):
    for mine, theirs in zip(one["steps"], two["steps"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            if name not in ("seconds", "tokens_per_second", "passes"):
                assert theirs[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert two["score"] == pytest.approx(one["score"], abs=1e-4)


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "settings", [pytest.param(it, id=name, marks=() if name in FAST else pytest.mark.engines) for name, it in SETTINGS.items()]
)  # fmt: skip
def test_two_processes_take_the_steps_of_one(model_folder, tmp_path, settings, sharding):
    one = take_steps(tmp_path / "one", model_folder, settings)
    two = take_steps(tmp_path / "two", model_folder, settings, sharding=sharding)
    check_same(tmp_path / "one", tmp_path / "two")
    check_same_metrics(one, two)


@pytest.mark.engines
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(("first", "then"), [("fsdp", "none"), ("none", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp")])
def test_a_checkpoint_goes_on_with_another_number_of_processes(model_folder, tmp_path, first, then, rank):
    settings = {"lora_rank": rank}
    take_steps(tmp_path / "straight", model_folder, settings)
    take_steps(tmp_path / "first", model_folder, settings, sharding=first, steps=STEPS[:2])
    begun = str(tmp_path / "first" / "checkpoint")
    take_steps(tmp_path / "then", model_folder, settings, sharding=then, steps=STEPS[2:], restore=begun)
    check_same(tmp_path / "straight", tmp_path / "then")


def test_trees_are_shared_whole_and_about_evenly():
    trees = trees_of_step(2)
    two = shares(trees, 2)
    assert sorted(map(id, [*two[0], *two[1]])) == sorted(map(id, trees))
    tokens = [sum(tree.num_tokens for tree in share) for share in two]
    assert max(tokens) - min(tokens) <= max(tree.num_tokens for tree in trees)
    assert shares(trees[:1], 3) == [[trees[0]], [], []]
