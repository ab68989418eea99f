"""TorchLearner: steps, live weights in shared memory, and checkpoints that continue bit for bit."""

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from small_learner import live, make_learner, make_trees, save_model
from tree_cases import FORKED

from art_core.errors import ArtError, ConfigError
from art_core.learner import tree_logprobs
from art_core.losses import cispo, dapo, dr_grpo, grpo, gspo
from art_core.token_tree import build_tree
from art_core.types import Call, LossOutputs, Trajectory
from art_embedded import TINY
from art_embedded.loading import bind, load_adapter, load_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def check_good_and_bad_move_apart(learner, tree):
    with torch.no_grad():
        change = tree_logprobs(learner.model, tree) - torch.from_numpy(tree.old_logprobs)
    trajectory = torch.from_numpy(tree.trajectory)
    assert change[trajectory == 0].sum() > 0 > change[trajectory == 1].sum()


@pytest.mark.smoke
@pytest.mark.system
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


def long_trees(learner):
    """Three trees of 305 tokens."""
    calls = [Call(prompt_ids=(4, 5, 6) * 100, sampled_ids=(token,) * 2, logprobs=(-2.0,) * 2) for token in (7, 8, 9)]
    tree = build_tree([Trajectory(task="t", calls=(call,)) for call in calls], [1.0, -1.0, 0.5])
    return [tree] * 3


def keep_more(learner, times):
    """Let every layer keep this many times its hidden states for the backward pass, without changing the result."""

    def keep(module, inputs, output):
        return output + 0.0 * (output.repeat(1, 1, times) ** 2).mean(-1, keepdim=True)

    for layer in learner.model.get_decoder().layers:
        layer.mlp.register_forward_hook(keep)


@pytest.fixture
def small_machine(monkeypatch):
    """A machine whose memory holds passes of three long trees, by the estimate."""
    monkeypatch.setattr("art_core.learner.gradients.machine_memory", lambda: 4 * 1000 * 2 * (18 * 16 + 6 * 24) * 4)


@pytest.mark.parametrize("rank", [0, 2])
def test_passes_that_take_more_memory_than_estimated_become_shorter(model_folder, small_machine, caplog, rank):
    learner = make_learner(model_folder, lora_rank=rank)
    trees = long_trees(learner)
    keep_more(learner, 100)
    assert [learner.step(trees)["passes"] for _ in range(3)] == [1, 3, 3]
    (warning,) = [record.getMessage() for record in caplog.records if "activations" in record.getMessage()]
    assert "times the estimated activations, so passes now have at most " in warning and "instead of 1000" in warning


def test_passes_keep_their_length_if_the_estimate_is_about_right_or_the_user_has_set_it(model_folder, small_machine):
    learner = make_learner(model_folder)
    assert [learner.step(long_trees(learner))["passes"] for _ in range(3)] == [1, 1, 1]
    learner = make_learner(model_folder, max_tokens_per_pass=1000)
    keep_more(learner, 100)
    assert [learner.step(long_trees(learner))["passes"] for _ in range(3)] == [1, 1, 1]


def test_a_resumed_learner_makes_the_shorter_passes_too(model_folder, small_machine, tmp_path):
    learner = make_learner(model_folder)
    trees = long_trees(learner)
    keep_more(learner, 100)
    for _ in range(4):
        learner.step(trees)
    learner.save(tmp_path / "saved")
    resumed = make_learner(model_folder)
    keep_more(resumed, 100)
    resumed.restore(tmp_path / "saved")
    first, second = learner.step(trees), resumed.step(trees)
    assert first["passes"] == second["passes"] == 3
    assert first["grad_norm"] == second["grad_norm"] and first["loss"] == second["loss"]


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


def test_the_learning_rate_decays_over_the_last_steps_and_never_to_zero(model_folder):
    learner = make_learner(model_folder, steps=4, decay_steps=2, learning_rate=0.3e-3)
    trees = make_trees(learner)
    rates = [learner.step(trees)["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([3e-4, 3e-4, 2e-4, 1e-4, 1e-4])


def test_the_decay_follows_the_runs_steps_and_the_warm_up_the_updates(model_folder):
    learner = make_learner(model_folder, steps=10, decay_steps=2, warmup_steps=2, learning_rate=0.6e-3)
    trees, rates = make_trees(learner), []
    for run_step in (7, 9, 10):
        learner.begin_step(run_step)
        rates.append(learner.step(trees)["learning_rate"])
    assert rates == pytest.approx([3e-4, 4e-4, 2e-4])


@pytest.mark.parametrize(
    ("rank", "size", "rate"), [(0, 10**6, 5e-4), (0, 10**8, 1e-5), (2, 10**8, 5e-4), (2, 2 * 10**9, 1e-4)]
)
def test_the_learning_rate_fits_what_is_trained(model_folder, monkeypatch, rank, size, rate):
    monkeypatch.setattr(transformers.PreTrainedModel, "num_parameters", lambda _: size)
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


def test_a_bound_of_0_clips_no_gradient(model_folder):
    learners = [make_learner(model_folder, max_grad_norm=bound) for bound in (0, 1e9)]
    for learner in learners:
        learner.step(make_trees(learner))
    free, unbounded = map(live, learners)
    assert all(torch.equal(tensor, unbounded[name]) for name, tensor in free.items())
    start = live(make_learner(model_folder))
    assert not all(torch.equal(tensor, start[name]) for name, tensor in free.items())


@pytest.mark.parametrize("rank", [0, 2])
def test_weights_that_do_not_fit_in_shared_memory_are_served_by_path(model_folder, tmp_path, monkeypatch, caplog, rank):
    monkeypatch.setattr("art_core.learner.torch_learner.SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10_000))
    learner, shared = make_learner(model_folder, lora_rank=rank), make_learner(model_folder, lora_rank=rank)
    assert learner.weights().live is None
    monkeypatch.undo()
    for each in (learner, shared):
        each.step(make_trees(each))
    assert learner.weights().live is None
    assert ["don't fit in" in record.message for record in caplog.records] == [True], "logged once, by one learner"
    path = learner.publish(tmp_path / "serving").path
    assert not (tmp_path / "serving" / "optimizer.state").exists()
    served = load_adapter(str(model_folder), path) if rank else load_model(str(path))
    parameters = dict(served.named_parameters())
    for name, tensor in live(shared).items():
        torch.testing.assert_close(parameters[name].data, tensor, msg=name)


@pytest.mark.parametrize("rank", [0, 2])
def test_published_weights_are_as_readable_as_their_config(model_folder, tmp_path, rank):
    path = make_learner(model_folder, lora_rank=rank).publish(tmp_path / "serving").path
    modes = {file.name: file.stat().st_mode for file in path.iterdir()}
    assert any(name.endswith(".safetensors") for name in modes) and len(set(modes.values())) == 1


def test_live_weights_with_an_unknown_name_or_none_at_all_are_refused(model_folder):
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = make_learner(model_folder).weights().live[name]
    for wrong in ({}, {name: tensor, "model.layers.9.mlp.up_proj.weight": tensor}):
        with pytest.raises(ConfigError, match="the live weights don't match"):
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


def test_kl_with_a_loss_that_has_no_such_argument_is_refused(model_folder):
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


def test_any_loss_can_be_passed(model_folder):
    def push_up(inputs):
        return LossOutputs(-inputs.logprobs.mean(), {"rows": float(len(inputs.logprobs))})

    metrics = make_learner(model_folder, loss=push_up).step([build_tree(FORKED)])
    assert metrics["rows"] == 11 and metrics["loss"] > 0


@pytest.mark.parametrize("rank", [0, 2])
def test_a_text_gets_the_logprobs_of_its_tree(model_folder, rank):
    learner, ids = make_learner(model_folder, lora_rank=rank), [1 + 7 * place % 11 for place in range(37)]
    learner.step(make_trees(learner))
    call = Call(prompt_ids=tuple(ids[:5]), sampled_ids=tuple(ids[5:]), logprobs=(0.0,) * (len(ids) - 5))
    expected = tree_logprobs(learner.model, build_tree([Trajectory(task=None, calls=(call,))]))
    scored = learner.score(ids)
    assert len(scored) == len(ids) - 1
    torch.testing.assert_close(torch.tensor(scored[4:]), expected.detach())


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


def test_a_step_restores_the_number_of_threads(model_folder):
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


def test_a_loss_without_importance_cap_is_refused_if_one_is_set(model_folder):
    def mine(inputs):
        return grpo(inputs)

    with pytest.raises(ConfigError, match="the loss mine takes no argument importance_cap"):
        make_learner(model_folder, loss=mine, importance_cap=2.0)


def test_without_its_packages_the_learner_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were missing
    with pytest.raises(ConfigError, match=r"install art-core\[train\]"):
        importlib.import_module("art_core.learner").TorchLearner  # noqa: B018
