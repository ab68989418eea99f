"""``learner="ray"``: the steps of one process, files on this machine, and what the death of a process leaves."""

import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_processes import trees_of_step
from safetensors.torch import load_file
from tree_cases import make_model

import art_core as art
from art_core.config import TrainConfig
from art_core.errors import ArtError, ConfigError, NotFiniteError, StoreError
from art_core.learner import TorchLearner
from art_core.losses import dapo, grpo
from art_core.testing import FakeEngine
from art_core.types import Call
from art_ray import RayLearner

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen3").save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def config_of(model_folder, **settings):
    common = {"model": str(model_folder), "warmup_steps": 0, "seed": 3, "learning_rate": 1e-3, "lora_rank": 4}
    return TrainConfig(**{**common, "learner_args": {"processes": 2}, **settings})


@pytest.fixture(scope="module")
def shared(local_ray, model_folder):
    """For tests after which it is as good as before; its processes take seconds to start."""
    made = RayLearner(model_folder, config_of(model_folder), grpo)
    yield made
    made.close()


@pytest.fixture
def learner(local_ray, model_folder):
    made = RayLearner(model_folder, config_of(model_folder), grpo)
    yield made
    made.close()


def weights(folder):
    return load_file(next(folder.rglob("adapter_model.safetensors")))


def check_same(one, two):
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.system
def test_it_takes_the_steps_of_one_process_and_its_checkpoints_are_the_same(shared, model_folder, tmp_path):
    learner = shared
    alone = TorchLearner(model_folder, config_of(model_folder), grpo)
    assert learner.choice == "learner='ray': 2 CPU processes (ddp)"
    for step in range(4):
        loss = partial(dapo, clip_high=0.3) if step == 2 else None
        mine, theirs = alone.step(trees_of_step(step), loss=loss), learner.step(trees_of_step(step), loss=loss)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4)
        assert learner.version == alone.version == step + 1
    assert learner.score([3, 1, 4]) == pytest.approx(alone.score([3, 1, 4]), abs=1e-5)
    assert learner.measure(trees_of_step(0)) > 0 and learner.version == 4
    assert learner.weights().live is None and learner.weights().version == 4
    for each, folder in ((alone, tmp_path / "alone"), (learner, tmp_path / "ray")):
        each.save(folder)
        assert each.publish(folder / "published").path == folder / "published" / "adapter"
    check_same(weights(tmp_path / "alone" / "adapter"), weights(tmp_path / "ray" / "adapter"))
    alone.restore(tmp_path / "ray")
    learner.restore(tmp_path / "alone")
    check = [each.step(trees_of_step(0))["grad_norm"] for each in (alone, learner)]
    assert check[1] == pytest.approx(check[0], rel=1e-3)


@pytest.mark.system
def test_where_all_processes_fail_alike_the_learner_goes_on(shared, tmp_path):
    learner, before = shared, shared.version
    with pytest.raises(ValueError, match="no token trees"):
        learner.step([])
    with pytest.raises(StoreError, match=r"no learner\.json"):
        learner.restore(tmp_path)
    whole, pairs = trees_of_step(0)
    with pytest.raises(NotFiniteError, match="is not finite") as raised:
        learner.step([replace(whole, advantages=whole.advantages * np.float32("inf")), pairs])
    assert raised.value.details["gradients"]
    learner.step(trees_of_step(0))
    assert learner.version == before + 1


def comes_first(folder):
    """Whether this process is the first to call this."""
    try:
        (Path(folder) / "taken").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def failing_on_one(inputs, folder):
    """A loss that fails in the process that comes first."""
    if comes_first(folder):
        raise RuntimeError("out of memory")
    return grpo(inputs)


@pytest.mark.engines
def test_where_one_process_fails_alone_nothing_is_half_stepped(learner, tmp_path):
    with pytest.raises(ArtError, match=r"learner on Ray is gone.*RuntimeError: out of memory.*same run_dir"):
        learner.step(trees_of_step(0), loss=partial(failing_on_one, folder=str(tmp_path)))
    assert learner.version not in (0, 1)
    with pytest.raises(ArtError, match="learner on Ray is gone"):
        learner.save(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def dying_after_the_other_failed(inputs, folder):
    """A loss that raises in one process; the other dies later, as if the first had noticed its death before Ray did."""
    if comes_first(folder):
        raise RuntimeError("connection reset")
    time.sleep(1)
    (Path(folder) / "died").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.engines
def test_the_death_of_a_process_is_the_cause_even_if_another_fails_first(learner, tmp_path):
    learner.step(trees_of_step(0))
    processes = learner.process_ids()
    with pytest.raises(ArtError, match="learner on Ray is gone") as raised:
        learner.step(trees_of_step(0), loss=partial(dying_after_the_other_failed, folder=str(tmp_path)))
    died = processes.index(int((tmp_path / "died").read_text()))
    assert f"process {died} of 2 failed (step): The actor died" in str(raised.value)
    assert "connection reset" not in str(raised.value)
    assert learner.version not in (1, 2)


def group():
    calls = [Call(prompt_ids=(1, 2, 3), sampled_ids=(4 + it, 5), logprobs=(-1.0, -1.0)) for it in range(2)]
    runs = [art.Trajectory(task="t", calls=(call,), reward=float(it)) for it, call in enumerate(calls)]
    return art.Group("t", tuple(runs))


@pytest.mark.engines
async def test_after_the_death_of_a_process_the_run_goes_on_from_its_checkpoint(local_ray, tmp_path):
    settings = {"model": "tiny", "learner": "ray", "learner_args": {"processes": 2}}
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), **settings) as run:
        await run.learn([group()])
        os.kill((await run.learner()).process_ids()[0], signal.SIGKILL)
        with pytest.raises(
            ArtError, match=r"process \d of 2 failed \((begin_)?step\).*train again with the same run_dir"
        ):
            await run.learn([group()])
    async with art.open_run(tmp_path / "run", engine=FakeEngine(), **settings) as run:
        assert (run.step, (await run.learner()).version) == (1, 1)
        await run.learn([group()])
        learner = await run.learner()
        assert (run.step, learner.version) == (2, 2)
    with pytest.raises(ArtError, match="this learner is closed"):
        learner.score([1, 2])


@pytest.mark.engines
def test_sharded_and_on_machines_that_share_no_disk(local_ray, model_folder, tmp_path, monkeypatch):
    config = config_of(model_folder, learner_args={"processes": 2, "sharding": "fsdp"})
    alone, learner = TorchLearner(model_folder, config, grpo), RayLearner(model_folder, config, grpo)
    monkeypatch.setattr("art_ray.learner.same_disk", lambda process, folder: False)
    for name in (".ray.arriving", ".published.arriving"):  # of a process that was killed while it received them
        (tmp_path / name / "adapter").mkdir(parents=True)
        (tmp_path / name / "adapter" / "adapter_model.safetensors").write_bytes(b"half of it")
    try:
        for step in range(2):
            alone.step(trees_of_step(step))
            learner.step(trees_of_step(step))
        learner.save(tmp_path / "ray")
        assert learner.publish(tmp_path / "published").path == tmp_path / "published" / "adapter"
        learner.step(trees_of_step(2))
        learner.restore(tmp_path / "ray")
        assert learner.version == 2
        alone.save(tmp_path / "alone")
        check_same(weights(tmp_path / "alone"), weights(tmp_path / "ray"))
        check_same(weights(tmp_path / "alone"), weights(tmp_path / "published"))
        assert sorted(it.name for it in tmp_path.iterdir()) == ["alone", "published", "ray"]
    finally:
        learner.close()


@pytest.mark.system
def test_a_cluster_without_room_says_who_asks_for_what(local_ray, model_folder):
    args = {"processes": 50, "start_seconds": 1}
    with pytest.raises(ConfigError, match=r"not place 50 learner processes of 1 CPU each.*the cluster has 4 CPU"):
        RayLearner(model_folder, config_of(model_folder, learner_args=args), grpo)


@pytest.mark.engines
def test_a_model_that_another_machine_lacks_is_named(local_ray, tmp_path):
    with pytest.raises(ConfigError, match=r"has no folder .*nowhere: put the model there"):
        RayLearner(tmp_path / "nowhere", config_of(tmp_path / "nowhere"), grpo)
