"""TorchLearner: steps, live weights in shared memory, and checkpoints that continue bit for bit."""

import json
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tree_cases import FORKED, make_model

from art_core.config import TINY, TrainConfig
from art_core.engine.loading import bind, load_adapter, load_model
from art_core.errors import ArtError, ConfigError, StoreError
from art_core.learner import TorchLearner, tree_logprobs
from art_core.losses import cispo, dapo, dr_grpo, grpo, gspo
from art_core.token_tree import build_tree
from art_core.types import Call, LossOutputs, Trajectory


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model("qwen3").half().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def make_learner(folder, loss=grpo, **settings):
    return TorchLearner(folder, TrainConfig(**{"warmup_steps": 0, "seed": 3, **settings}), loss)


def make_trees(learner):
    """FORKED, with the logprobs that the learner's start weights give."""
    tree = build_tree(FORKED, [1.0, -1.0, 0.5])
    with torch.no_grad():
        logprobs = tree_logprobs(learner.model, tree)
    return [replace(tree, old_logprobs=logprobs.numpy())]


def check_good_and_bad_move_apart(learner, tree):
    with torch.no_grad():
        change = tree_logprobs(learner.model, tree) - torch.from_numpy(tree.old_logprobs)
    trajectory = torch.from_numpy(tree.trajectory)
    assert change[trajectory == 0].sum() > 0 > change[trajectory == 1].sum()


def live(learner):
    return {name: tensor.clone() for name, tensor in learner.weights().live.items()}


@pytest.mark.parametrize("settings", [{"lora_rank": 2}, {"kl": 0.1}, {"importance_cap": 2.0}])
def test_how_many_tokens_a_pass_has_changes_nothing(model_folder, settings):
    outcomes = []
    for tokens in (3, 20, 1000):
        learner = make_learner(model_folder, max_tokens_per_pass=tokens, **settings)
        tree = make_trees(learner)[0]
        trees = [tree, replace(tree, advantages=-0.5 * tree.advantages), tree]
        outcomes.append([learner.step(trees), learner.step(trees)])
    assert [steps[0]["passes"] for steps in outcomes] == [3, 3, 1]
    for steps in outcomes[:-1]:
        for metrics, whole in zip(steps, outcomes[-1], strict=True):
            for name in ("loss", "grad_norm", "entropy", "logprob_gap", "targets", "tokens", "ratio"):
                assert metrics[name] == pytest.approx(whole[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize("rank", [0, 2])
def test_a_step_makes_the_good_runs_likelier_and_the_bad_ones_less_likely(model_folder, rank):
    learner = make_learner(model_folder, lora_rank=rank, learning_rate=0.003)
    trees = make_trees(learner)
    metrics = [learner.step(trees) for _ in range(3)][-1]
    check_good_and_bad_move_apart(learner, trees[0])
    assert learner.version == 3
    assert metrics["trajectories"] == 2 and metrics["targets"] == 11 and metrics["tokens"] == trees[0].num_tokens
    assert metrics["logprob_gap"] > 0 and metrics["grad_norm"] > 0 and metrics["learning_rate"] == 0.003


def test_before_the_first_step_the_ratio_is_one(model_folder):
    learner = make_learner(model_folder)
    metrics = learner.step(make_trees(learner))
    assert metrics["logprob_gap"] < 1e-6 and metrics["clip_fraction"] == 0
    assert metrics["ratio"] == pytest.approx(1.0)


def test_one_tree_or_one_per_group_is_the_same_step(model_folder):
    together, apart = make_learner(model_folder), make_learner(model_folder)
    advantages = [1.0, -1.0, 0.5]
    first = together.step([build_tree(FORKED, advantages)])
    second = apart.step([build_tree([run], [a]) for run, a in zip(FORKED, advantages, strict=True)])
    for name in ("loss", "grad_norm", "ratio", "logprob_gap"):
        assert first[name] == pytest.approx(second[name], rel=1e-4, abs=1e-6), name


def test_the_learning_rate_warms_up(model_folder):
    learner = make_learner(model_folder, warmup_steps=3, learning_rate=0.3e-3)
    trees = make_trees(learner)
    rates = [learner.step(trees)["learning_rate"] for _ in range(4)]
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 3e-4])


@pytest.mark.parametrize(("rank", "rate"), [(0, 5e-4), (2, 1e-4)])
def test_the_learning_rate_fits_what_is_trained(model_folder, rank, rate):
    assert make_learner(model_folder, lora_rank=rank).learning_rate == rate


@pytest.mark.parametrize("rank", [0, 2])
def test_live_weights_are_the_plain_models_and_follow_the_training(model_folder, rank):
    learner = make_learner(model_folder, lora_rank=rank, learning_rate=0.01)
    plain = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    start = live(learner)
    parameters = dict(plain.named_parameters())
    adapted = {name for name in parameters if name.endswith("_proj.weight")}
    assert start.keys() == (adapted if rank else parameters.keys())
    for name, tensor in start.items():
        assert torch.equal(tensor, parameters[name]), name
    trees = make_trees(learner)
    learner.step(trees)
    weights = learner.weights()
    assert weights.version == 1 and weights.path is None
    assert all(tensor.is_shared() and not tensor.requires_grad for tensor in weights.live.values())
    bind(plain, weights.live)
    assert all(parameters[name].data_ptr() == tensor.data_ptr() for name, tensor in weights.live.items())
    with torch.no_grad():
        torch.testing.assert_close(tree_logprobs(plain, trees[0]), tree_logprobs(learner.model, trees[0]))
    assert not torch.equal(
        start["model.layers.0.mlp.up_proj.weight"], weights.live["model.layers.0.mlp.up_proj.weight"]
    )


@pytest.mark.parametrize("rank", [0, 2])
def test_live_weights_are_one_piece_of_memory_that_one_file_descriptor_sends(model_folder, rank):
    tensors = make_learner(model_folder, lora_rank=rank).weights().live.values()
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    assert all(tensor.data_ptr() % 64 == 0 and tensor.is_contiguous() for tensor in tensors)


@pytest.mark.parametrize("rank", [0, 2])
def test_weights_that_do_not_fit_in_shared_memory_are_served_by_path(model_folder, tmp_path, monkeypatch, caplog, rank):
    monkeypatch.setattr("art_core.learner.shared_memory.FOLDER", tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10_000))
    learner, shared = make_learner(model_folder, lora_rank=rank), make_learner(model_folder, lora_rank=rank)
    assert learner.weights().live is None
    monkeypatch.undo()
    for each in (learner, shared):
        each.step(make_trees(each))
    assert learner.weights().live is None
    assert ["do not fit in" in record.message for record in caplog.records] == [True], "said once, of one learner"
    path = learner.publish(tmp_path / "serving").path
    assert not (tmp_path / "serving" / "optimizer.safetensors").exists()
    served = load_adapter(str(model_folder), path) if rank else load_model(str(path))
    parameters = dict(served.named_parameters())
    for name, tensor in live(shared).items():
        torch.testing.assert_close(parameters[name].data, tensor, msg=name)


@pytest.mark.parametrize("rank", [0, 2])
def test_whoever_may_read_the_config_of_published_weights_may_read_the_weights(model_folder, tmp_path, rank):
    path = make_learner(model_folder, lora_rank=rank).publish(tmp_path / "serving").path
    modes = {file.name: file.stat().st_mode for file in path.iterdir()}
    assert any(name.endswith(".safetensors") for name in modes) and len(set(modes.values())) == 1


def test_live_weights_with_an_unknown_name_or_none_at_all_are_refused(model_folder):
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = make_learner(model_folder).weights().live[name]
    for wrong in ({}, {name: tensor, "model.layers.9.mlp.up_proj.weight": tensor}):
        with pytest.raises(ConfigError, match="are not those of"):
            bind(load_model(str(model_folder)), wrong)


@pytest.mark.parametrize("rank", [0, 2])
def test_kl_pulls_towards_the_start_weights(model_folder, rank):
    free, held = (make_learner(model_folder, lora_rank=rank, learning_rate=0.01, kl=kl) for kl in (0.0, 5.0))
    trees = make_trees(free)
    for _ in range(5):
        free.step(trees)
        metrics = held.step(trees)
    assert metrics["kl_ref"] > 0
    with torch.no_grad():
        gaps = [
            (tree_logprobs(x.model, trees[0]) - torch.from_numpy(trees[0].old_logprobs)).abs().mean()
            for x in (free, held)
        ]
    assert gaps[1] < gaps[0]


def test_kl_with_a_loss_that_knows_none_is_refused(model_folder):
    with pytest.raises(ConfigError, match="the loss mine takes no argument kl"):

        def mine(inputs):
            raise AssertionError

        make_learner(model_folder, loss=mine, kl=0.1)


def test_a_step_without_trees_is_an_error(model_folder):
    with pytest.raises(ValueError, match="no token trees"):
        make_learner(model_folder).step([])


def test_without_trained_targets_no_step_is_taken(model_folder):
    learner = make_learner(model_folder)
    start = live(learner)
    assert learner.step([build_tree([FORKED[2]], [1.0])]) == {"skipped": 1.0}
    assert learner.version == 0
    assert all(torch.equal(start[name], tensor) for name, tensor in live(learner).items())


def test_measuring_changes_nothing(model_folder):
    measured, fresh = make_learner(model_folder), make_learner(model_folder)
    assert measured.measure(make_trees(measured)) > 0
    for learner in (measured, fresh):
        learner.step(make_trees(learner))
    assert measured.version == 1
    assert all(torch.equal(live(measured)[name], tensor) for name, tensor in live(fresh).items())


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(model_folder):
    learner = make_learner(model_folder)
    start = live(learner)
    with pytest.raises(ArtError, match="gradient of step 1 is not finite"):
        learner.step([build_tree(FORKED, [float("inf"), 1.0, 1.0])])
    assert learner.version == 0
    assert all(torch.equal(start[name], tensor) for name, tensor in live(learner).items())


def test_any_loss_can_be_handed_in(model_folder):
    def push_up(inputs):
        return LossOutputs(-inputs.logprobs.mean(), {"rows": float(len(inputs.logprobs))})

    metrics = make_learner(model_folder, loss=push_up).step([build_tree(FORKED)])
    assert metrics["rows"] == 11 and metrics["loss"] > 0


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


def test_a_saved_folder_is_a_model_of_its_own(model_folder, tmp_path):
    learner = make_learner(model_folder)
    learner.step(make_trees(learner))
    learner.save(tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "tokenizer.json").read_text() == "{}"
    again = make_learner(tmp_path / "checkpoint")
    assert all(torch.equal(live(again)[name], tensor) for name, tensor in live(learner).items())


@pytest.mark.parametrize("rank", [0, 2])
def test_a_text_is_scored_as_its_tree_is(model_folder, rank):
    learner, ids = make_learner(model_folder, lora_rank=rank), [1 + 7 * place % 11 for place in range(37)]
    learner.step(make_trees(learner))
    call = Call(prompt_ids=tuple(ids[:5]), sampled_ids=tuple(ids[5:]), logprobs=(0.0,) * (len(ids) - 5))
    expected = tree_logprobs(learner.model, build_tree([Trajectory(task=None, calls=(call,))]))
    scored = learner.score(ids)
    assert len(scored) == len(ids) - 1
    torch.testing.assert_close(torch.tensor(scored[4:]), expected.detach())


def test_nothing_in_a_checkpoint_needs_unpickling(model_folder, tmp_path):
    learner = make_learner(model_folder, lora_rank=2)
    learner.step(make_trees(learner))
    learner.save(tmp_path / "checkpoint")
    files = {str(file.relative_to(tmp_path / "checkpoint")) for file in (tmp_path / "checkpoint").rglob("*.*")}
    assert {"learner.json", "optimizer.safetensors", "adapter/adapter_model.safetensors"} <= files
    assert {file.rpartition(".")[2] for file in files} <= {"json", "safetensors", "md"}
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
    with monkeypatch.context() as patched, pytest.raises(StoreError, match=r"could not be written.*No space left"):
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
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "learner.json", "config.json"])
def test_a_damaged_file_is_named(model_folder, tmp_path, name, damage):
    learner = make_learner(model_folder)
    learner.save(tmp_path / "checkpoint")
    damage(tmp_path / "checkpoint" / name)
    with pytest.raises(StoreError, match=name):
        make_learner(model_folder).restore(tmp_path / "checkpoint")


@pytest.mark.parametrize("damage", [flip_a_bit, cut, lambda file: file.unlink()])
def test_whoever_meets_a_damaged_checkpoint_is_told_to_delete_it(model_folder, tmp_path, damage):
    learner = make_learner(model_folder)
    learner.save(tmp_path / "checkpoint")
    damage(tmp_path / "checkpoint" / "model.safetensors")
    with pytest.raises(StoreError, match=f"delete {tmp_path / 'checkpoint'}: the run then goes on from the checkpoint"):
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


def test_the_same_seed_makes_the_same_run(model_folder):
    first, second = (make_learner(model_folder, lora_rank=2) for _ in range(2))
    for learner in (first, second):
        learner.step(make_trees(learner))
    assert all(torch.equal(live(second)[name], tensor) for name, tensor in live(first).items())


def test_the_model_that_ships_takes_a_step(tmp_path):
    learner = make_learner(TINY)
    metrics = learner.step(make_trees(learner))
    assert metrics["grad_norm"] > 0 and metrics["logprob_gap"] < 1e-5
    learner.save(tmp_path / "checkpoint")
    tokenizers = [transformers.AutoTokenizer.from_pretrained(path) for path in (TINY, tmp_path / "checkpoint")]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert tokenizers[0].encode("What is 2 + 2?") == tokenizers[1].encode("What is 2 + 2?")


def test_a_step_leaves_the_number_of_threads_as_it_was(model_folder):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    learner = make_learner(model_folder)
    learner.step(make_trees(learner))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


@pytest.mark.parametrize("loss", [grpo, dr_grpo, dapo, cispo, gspo], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("cap", [None, 2.0], ids=["plain", "corrected"])
def test_every_loss_makes_good_runs_likelier_and_bad_ones_less_likely(model_folder, loss, cap):
    learner = make_learner(model_folder, loss=loss, learning_rate=0.003, importance_cap=cap, kl=0.01)
    trees = make_trees(learner)
    metrics = [learner.step(trees) for _ in range(3)][-1]
    check_good_and_bad_move_apart(learner, trees[0])
    assert metrics["kl_ref"] > 0 and ("importance" in metrics) is (cap is not None)


@pytest.mark.parametrize("loss", [grpo, dr_grpo, dapo, cispo, gspo], ids=lambda loss: loss.__name__)
def test_one_tree_or_one_per_run_is_the_same_step_for_every_loss(model_folder, loss):
    metrics, weights = [], []
    for split in (False, True):
        learner = make_learner(model_folder, loss=loss, importance_cap=1.5, max_grad_norm=1e9)
        old = make_trees(learner)[0].old_logprobs + np.linspace(-1, 1, 12, dtype=np.float32)
        ends = iter(np.split(old, [5, 11]))
        if split:
            trees = [build_tree([run], [a]) for run, a in zip(FORKED, [1.0, -1.0, 0.5], strict=True)]
            trees = [replace(tree, old_logprobs=next(ends)) for tree in trees]
        else:
            trees = [replace(build_tree(FORKED, [1.0, -1.0, 0.5]), old_logprobs=old)]
        metrics.append(learner.step(trees))
        weights.append(live(learner))
    timings = ("seconds", "tokens_per_second", "tokens")
    for name in metrics[0].keys() - set(timings):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-4, abs=1e-6), name
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=2e-5)


def test_the_correction_of_engine_and_learner_is_measured(model_folder):
    learner = make_learner(model_folder, importance_cap=1.5)
    trees = [
        replace(tree, old_logprobs=tree.old_logprobs - np.log(2.0, dtype=np.float32)) for tree in make_trees(learner)
    ]
    metrics = learner.step(trees)
    assert metrics["importance"] == pytest.approx(2.0, rel=1e-4) and metrics["importance_max"] == pytest.approx(
        2.0, rel=1e-4
    )
    assert metrics["importance_truncated"] == 1.0
    assert metrics["ratio"] == pytest.approx(1.0) and metrics["clip_fraction"] == 0.0


def test_a_loss_without_importance_cap_is_refused_where_one_is_set(model_folder):
    def mine(inputs):
        return grpo(inputs)

    with pytest.raises(ConfigError, match="the loss mine takes no argument importance_cap"):
        make_learner(model_folder, loss=mine, importance_cap=2.0)
