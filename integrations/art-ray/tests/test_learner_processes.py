"""A learner on two processes takes the steps of one: replicated (DDP) or sharded (FSDP2), by gloo on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learner_processes import run, trees_of_step
from safetensors.torch import load_file
from tree_cases import make_model

from art_core.learner.alone import Alone
from art_ray.sharding import shares

ROOT = Path(__file__).parents[3]
STEPS = [0, 1, 2, 3, 4]
FAMILIES = ("gemma2 with a cap", "gpt-oss with experts", "deepseek-v3 with experts", "mistral with a window")
HALF = ("all weights", "lora")
"""What is also begun by one number of processes and ended by another."""
SETTINGS = {
    "all weights": {"lora_rank": 0},
    "lora": {"lora_rank": 4},
    "kl, all weights": {"lora_rank": 0, "kl": 0.1},
    "kl, lora": {"lora_rank": 4, "kl": 0.1},
    "capped importance": {"lora_rank": 0, "importance_cap": 2.0},
    "many passes": {"lora_rank": 0, "max_tokens_per_pass": 20},
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen3").save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def job(model, name, steps=STEPS, restore=None):
    settings = SETTINGS.get(name.partition(":")[0], {"lora_rank": 0, "kl": 0.1})
    return {
        "name": name,
        "model": str(model),
        "settings": settings,
        "steps": steps,
        "restore": restore and str(restore),
    }


def take_steps(folder, sharding, jobs):
    """Do the jobs in two processes, and return their folder."""
    folder.mkdir(exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    (folder / "meeting").unlink(missing_ok=True)
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    children = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "learner_processes.py"), str(folder), sharding, str(rank), "2"],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [child.communicate(timeout=200)[1] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [0, 0], "\n".join(it[-3000:] for it in said)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory, model_folder):
    """The steps of one process, and where each job stood after two."""
    folder = tmp_path_factory.mktemp("alone")
    for name in SETTINGS:
        run(folder, job(model_folder, name), Alone())
    for name in HALF:
        run(folder, job(model_folder, f"{name}:half", STEPS[:2]), Alone())
    return folder


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def together(request, tmp_path_factory, model_folder, alone):
    """The same by two processes, and the end of what one process began."""
    jobs = [job(model_folder, name) for name in SETTINGS]
    jobs += [job(model_folder, f"{name}:half", STEPS[:2]) for name in HALF]
    jobs += [job(model_folder, f"{name}:end", STEPS[2:], alone / f"{name}:half/checkpoint") for name in HALF]
    return take_steps(tmp_path_factory.mktemp(request.param), request.param, jobs)


def tensors(folder):
    return {
        f"{file.relative_to(folder)}:{name}": tensor
        for file in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
        if not name.startswith("random/")
    }


def check_same(one, two):
    """The same files and names, and values within 1e-5; the optimizer's moments too."""
    mine, theirs = tensors(one / "checkpoint"), tensors(two / "checkpoint")
    assert mine.keys() == theirs.keys() and len(mine) > 10
    for name, tensor in mine.items():
        torch.testing.assert_close(
            theirs[name], tensor, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name} {text}"
        )
    published = tensors(two / "published")
    assert published and all(torch.equal(theirs[name], tensor) for name, tensor in published.items())
    files = [sorted(str(it.relative_to(folder)) for it in folder.rglob("*")) for folder in (one, two)]
    assert files[0] == files[1]


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text())


@pytest.mark.system
@pytest.mark.parametrize("name", SETTINGS)
def test_two_processes_take_the_steps_of_one_also_after_a_step_that_both_refused(alone, together, name):
    check_same(alone / name, together / name)
    one, two = metrics_of(alone / name), metrics_of(together / name)
    assert two["score"] == pytest.approx(one["score"], abs=1e-4)
    for mine, theirs in zip(one["steps"], two["steps"], strict=True):
        assert mine.keys() == theirs.keys()
        for metric in mine.keys() - {"seconds", "tokens_per_second", "passes"}:
            assert theirs[metric] == pytest.approx(mine[metric], rel=1e-3, abs=1e-5), metric


@pytest.mark.system
@pytest.mark.parametrize("name", HALF)
def test_a_checkpoint_goes_on_with_another_number_of_processes(alone, together, model_folder, tmp_path, name):
    check_same(alone / name, together / f"{name}:end")
    run(tmp_path, job(model_folder, f"{name}:end", STEPS[2:], together / f"{name}:half/checkpoint"), Alone())
    check_same(alone / name, tmp_path / f"{name}:end")


@pytest.mark.engines
def test_families_are_sharded_as_they_are_computed(tmp_path):
    jobs = []
    for name in FAMILIES:
        make_model(name).save_pretrained(tmp_path / f"model {name}")
        jobs.append(job(tmp_path / f"model {name}", name, STEPS[:3]))
        run(tmp_path / "alone", jobs[-1], Alone())
    take_steps(tmp_path / "fsdp", "fsdp", jobs)
    for name in FAMILIES:
        check_same(tmp_path / "alone" / name, tmp_path / "fsdp" / name)


def test_trees_are_shared_whole_and_about_evenly():
    trees = trees_of_step(2)
    two = shares(trees, 2)
    assert sorted(map(id, [*two[0], *two[1]])) == sorted(map(id, trees))
    tokens = [sum(tree.num_tokens for tree in share) for share in two]
    assert max(tokens) - min(tokens) <= max(tree.num_tokens for tree in trees)
    assert shares(trees[:1], 3) == [[trees[0]], [], []]
