"""What fits: against the learner itself, and by what must hold whatever the numbers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from art_core import losses
from art_core.config import make_config
from art_core.errors import ConfigError
from art_core.learner import gradients, unsloth
from art_core.learner.torch_learner import TorchLearner
from art_core.store import Store
from art_core.token_tree import build_tree
from art_core.types import Call, Trajectory
from art_embedded import TINY as FOLDER
from art_embedded import loading
from art_vllm.cost import cost, learner_flops
from art_vllm.gpus import GIB, GPUS, Gpu, find_gpu
from art_vllm.known_shapes import find_shape, known_shapes
from art_vllm.plan import (
    BFLOAT16_FROM,
    FOUR_BITS,
    Setup,
    _with_pass,
    default_pass,
    machine_parts,
    plan,
    remedies,
    sequence_bytes,
)
from art_vllm.plan import UNSLOTH as TAKEN_BY_UNSLOTH
from art_vllm.workload import Tokens, assumed, measured

QWEN = find_shape("Qwen/Qwen2.5-7B-Instruct")
TINY = find_shape("tiny")
H100 = find_gpu("H100")


def setup(**changes):
    return Setup(**{"shape": QWEN, "gpu": H100, **changes})


def size(found, name):
    return next(it.size for it in found.parts if it.name == name)


def why(found, name):
    return next(it.why for it in found.parts if it.name == name)


def agents(group_size, calls, prompt, sampled, start=0):
    """Runs whose first prompt is shared and whose later prompts are the one before with its answer; no answers alike."""
    runs = []
    for run in range(group_size):
        context, made = tuple(start + token for token in range(prompt)), []
        for call in range(calls):
            answer = tuple(10_000 * (1 + run) + 1000 * call + start + token for token in range(sampled))
            made.append(Call(prompt_ids=context, sampled_ids=answer, logprobs=(0.0,) * sampled))
            context += answer
        runs.append(Trajectory(task=start, calls=tuple(made), reward=float(run)))
    return runs


def trained(rank):
    """The tiny model's learner after a step."""
    config = make_config({}, lora_rank=rank, threads=1)
    learner = TorchLearner(FOLDER, config, losses.grpo)
    runs = [
        Trajectory(task=0, calls=(Call(prompt_ids=(1, 2, 3), sampled_ids=(4 + run, 5), logprobs=(-1.0, -1.0)),), reward=run)
        for run in range(2)
    ]  # fmt: skip
    learner.step([build_tree(runs, [1.0, -1.0])])
    return learner


@pytest.mark.parametrize("rank", [0, 4])
def test_weights_adapter_and_moments_are_as_large_as_the_learners(rank):
    learner, found = trained(rank), plan(setup(shape=TINY, context=512, lora_rank=rank, learner="torch"))
    held = sum(it.nbytes for it in learner.model.parameters())
    adapter = size(found, "learner: adapter") if rank else 0
    assert size(found, "learner: weights") + adapter == held
    moments = [it for state in learner._optimizer.state.values() for it in (state["exp_avg"], state["exp_avg_sq"])]
    assert size(found, "learner: AdamW") == sum(it.nbytes for it in moments)


def test_a_pass_is_as_long_as_the_learner_makes_it():
    config = AutoConfig.for_model(
        "qwen2", hidden_size=2048, intermediate_size=5632, num_hidden_layers=64, num_attention_heads=16,
        num_key_value_heads=2, vocab_size=96,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    shape = replace(QWEN, hidden=2048, feed_forward=5632, layers=64)
    memory = gradients.machine_memory()
    tokens = default_pass(setup(shape=shape, gpu=Gpu("this machine", memory), learner="torch"))
    assert 256 < tokens < 65536 and tokens == gradients.tokens_that_fit(model)


def test_the_learner_computes_what_is_counted():
    rng, logprobs = np.random.default_rng(0), (-1.0,) * 60
    prompt, *answers = rng.integers(2, 800, (5, 60)).tolist()
    calls = [Call(prompt_ids=tuple(prompt[:4]), sampled_ids=tuple(it), logprobs=logprobs) for it in answers]
    tree = build_tree([Trajectory(task=0, calls=(call,)) for call in calls], [1.0, -1.0, 1.0, -1.0])
    learner = trained(0)
    with FlopCounterMode(display=False) as counter:
        learner.measure([tree])
    found = plan(setup(shape=TINY, context=512, lora_rank=0, learner="torch"))
    work = assumed(4, 4, calls=1, prompt=4, sampled=60)
    assert work.learner.count == tree.num_tokens and work.targets == tree.num_targets
    # The counter sees neither the attention within segments nor the head's gradient, which is added in place: 8 % together.
    assert learner_flops(found, work) == pytest.approx(counter.get_total_flops(), rel=0.1)


def test_a_24_gb_card_trains_and_serves_a_7b_model():
    narrow = setup(gpu=find_gpu("RTX 4090"), context=4096)
    assert not plan(narrow).fits  # the learner's own copy stays while vLLM serves 16-bit weights
    found = plan(replace(narrow, serve_in_8bit=True), turns=True)
    assert found.fits and found.setup.in_4bit
    assert machine_parts(found)["the weights of a sleeping vLLM"] > 8 * GIB


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("gpu", GPUS, ids=lambda it: it.name)
def test_what_fits_leaves_the_margin(gpu, turns):
    for shape in known_shapes():
        found = plan(setup(shape=shape, gpu=gpu, context=4096), turns=turns)
        if found.fits:
            assert found.peak <= found.usable < gpu.memory
            assert 0 < found.utilization < 1
            assert found.utilization * gpu.memory >= sum(it.size for it in found.parts if it.engine)


def test_taking_turns_never_needs_more_and_side_by_side_needs_the_sum():
    turns, beside = plan(setup(), turns=True), plan(setup(), turns=False)
    assert beside.held("rollouts") == beside.held("learning") == sum(it.size for it in beside.parts)
    assert turns.sequences >= beside.sequences
    assert (
        turns.held("rollouts") + turns.held("learning")
        > turns.peak
        == max(turns.held("rollouts"), turns.held("learning"))
    )
    assert size(turns, "learner: weights") < turns.held("rollouts")  # the learner stays where it is


def test_a_loop_that_runs_ahead_has_nobody_to_take_turns_with():
    assert not plan(setup(staleness=1)).turns
    with pytest.raises(ValueError, match="empty"):
        plan(setup(staleness=1), turns=True)
    more = plan(setup(staleness=2), turns=False)
    assert size(more, "vllm: adapters") == 2 * size(plan(setup(), turns=False), "vllm: adapters")


def test_a_remedy_fits():
    for narrow in (
        setup(gpu=find_gpu("24GB")),
        setup(gpu=find_gpu("80GB"), lora_rank=0),
        setup(shape=find_shape("Qwen3-30B-A3B"), gpu=find_gpu("H200")),
    ):
        assert not plan(narrow).fits
        found = list(remedies(plan(narrow)))
        assert found and all(it.fits for _, it in found)


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 0}, {"staleness": 1}])
def test_what_is_missing_is_what_a_larger_card_has_more(changes):
    found = plan(setup(gpu=find_gpu("24GB"), **changes))

    def with_more(size):  # by itself a larger card would take a longer pass, and so be as narrow
        larger = replace(found.setup, gpu=Gpu("larger", int(found.setup.gpu.memory + size / 0.96)))
        return _with_pass(larger, found.turns, found.pass_tokens, found.default_pass)

    assert not found.fits and found.missing > 0
    assert with_more(found.missing + 2).fits and not with_more(found.missing - 10_000).fits
    assert plan(setup()).missing == 0


def test_the_optimizers_temporaries_are_not_taken_for_activations():
    found = plan(setup(gpu=find_gpu("B200"), lora_rank=0), turns=True)
    assert "AdamW" not in why(found, "learner: activations")
    short = _with_pass(found.setup, True, 256, found.default_pass)
    assert size(short, "learner: activations") == 4 * QWEN.parameters and "AdamW" in why(short, "learner: activations")


def test_no_remedy_changes_the_same_twice():
    for what, _ in remedies(plan(setup(gpu=find_gpu("24GB"), lora_rank=0))):
        first, _, second = what.partition(", and ")
        assert second and first.split(": ")[0] != second.split(": ")[0], what


def test_what_fits_is_only_told_of_much_more_room():
    found = plan(setup(gpu=find_gpu("RTX 4090"), serve_in_8bit=True, context=4096))
    better = list(remedies(found))
    assert found.fits and better and all(it.sequences >= 1.25 * found.sequences for _, it in better)
    assert "RTX 3090" not in " ".join(what for what, _ in better)


def test_the_cache_of_a_sequence():
    assert sequence_bytes(setup(context=1000)) == 1000 * 28 * 2 * 4 * 128 * 2
    assert sequence_bytes(setup(context=1000, gpus=2)) == 1000 * 28 * 2 * 2 * 128 * 2
    assert sequence_bytes(setup(context=1000, gpus=14)) == 1000 * 28 * 2 * 128 * 2  # four heads go to no more than four
    kimi = setup(shape=find_shape("Kimi-K2-Instruct"), context=1000, gpus=8)
    assert sequence_bytes(kimi) == 1000 * 61 * (512 + 64) * 2  # every GPU keeps the vector
    windowed = replace(QWEN, windowed=28, window=100)
    assert sequence_bytes(setup(shape=windowed, context=1000)) == 100 * 28 * 2 * 4 * 128 * 2
    assert sequence_bytes(setup(shape=windowed, context=1000, engine="embedded")) == 1000 * 28 * 2 * 4 * 128 * 2


def test_the_embedded_engine_serves_a_small_model_in_float32():
    assert BFLOAT16_FROM == loading.BFLOAT16_FROM
    small = plan(setup(shape=find_shape("Qwen2.5-0.5B-Instruct"), engine="embedded", context=1000))
    assert size(small, "embedded: weights") == 4 * small.setup.shape.parameters
    assert sequence_bytes(small.setup) == 1000 * 24 * 2 * 2 * 64 * 4
    large = plan(setup(engine="embedded", context=1000))
    assert size(large, "embedded: weights") == 2 * large.setup.shape.parameters


def test_four_bits_are_for_unsloth_and_where_sixteen_take_half_the_gpu():
    assert not setup().in_4bit and setup(gpu=find_gpu("24GiB")).in_4bit
    assert not setup(gpu=find_gpu("24GiB"), learner="torch").in_4bit
    packed = plan(setup(load_in_4bit=True))
    assert size(packed, "learner: weights") < 0.4 * size(plan(setup(load_in_4bit=False)), "learner: weights")
    assert pytest.approx(4.127 / 8, rel=1e-3) == FOUR_BITS  # QLoRA: 0.127 bits a parameter


def test_who_trains_is_what_auto_would_take():
    assert TAKEN_BY_UNSLOTH == unsloth.FAMILIES
    assert setup().trainer == "unsloth" and setup().rank == 16
    assert setup(lora_rank=0).trainer == "torch"
    assert setup(shape=TINY, context=512).trainer == "torch" and setup(shape=TINY, context=512).rank == 0
    assert setup(shape=find_shape("Qwen3-30B-A3B")).trainer == "torch"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"learner": "unsloth", "lora_rank": 0}, "learner='torch' to train all weights"),
        ({"learner": "torch", "load_in_4bit": True}, "need learner='unsloth'"),
        ({"lora_rank": 0, "load_in_4bit": True}, "need learner='unsloth'"),
        ({"context": 100_000}, "exceeds the 32768 positions"),
        ({"gpus": 3}, "can't split 28 attention heads over 3"),
        ({"engine": "embedded", "serve_in_8bit": True}, "only vLLM"),
        ({"lora_rank": 600}, "up to rank 512"),
    ],
)
def test_a_setup_that_no_run_takes_is_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        setup(**changes)


def test_a_tree_that_unsloth_cannot_cut_has_room():
    short, long = plan(setup(tree=1000)), plan(setup(tree=50_000))
    assert short.pass_tokens == short.default_pass and long.pass_tokens == 50_000
    assert size(long, "learner: activations") > size(short, "learner: activations")


@pytest.mark.parametrize(
    ("text", "memory"),
    [("24GB", 24e9), ("24gib", 24 * GIB), ("1.5 GiB", 1.5 * GIB), ("NVIDIA GeForce RTX 4090", 23.5 * GIB)],
)
def test_a_gpu_is_a_size_or_a_name(text, memory):
    assert find_gpu(text).memory == pytest.approx(memory)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda it: it.name)
def test_a_gpu_is_found_however_its_name_is_written(gpu):
    for name in (
        gpu.name,
        gpu.name.lower(),
        gpu.name.replace(" ", "_"),
        gpu.name.replace(" ", ""),
        f"nvidia {gpu.name}",
    ):
        assert find_gpu(name) is gpu


@pytest.mark.parametrize("name", ["a100", "A100 80GB", "NVIDIA A100-80GB", "a100 80", "A100_80GB_PCIe"])
def test_a_gpu_has_several_names(name):
    assert find_gpu(name).name == "A100-80GB"
    assert find_gpu("L4 24GB").name == "L4" and find_gpu("A100 40").memory < 40 * GIB
    assert find_gpu("4090 24gb").name == "RTX 4090" and find_gpu("A10 24GB").name == "A10"
    assert find_gpu("A10G").half < find_gpu("A10").half


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_gpu_is_found_by_what_its_driver_calls_it(told, name):
    assert find_gpu(told).name == name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("24", "or a size such as 24GB"),
        ("H1000", "did you mean 'H100'"),
        ("RTX 2080", "size; pass one of T4, L4, A10, .*MI300X"),
        ("100MB", "1 GiB"),
        ("A100 20GB", "A100-80GB has 79.1 GiB, not 20; pass 'A100-80GB', or a size alone: 20GB"),
        ("H100 NVL 94GB", "neither a known GPU"),
    ],
)
def test_a_gpu_that_is_neither_is_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        find_gpu(text)


def test_a_run_folder_says_how_many_tokens_a_step_has(tmp_path):
    with Store(tmp_path / "run.sqlite") as store:
        store.set_meta("model", "tiny")
        for step in (1, 2):
            for task in range(2):
                for number, run in enumerate(agents(4, 3, 100, 10, start=task * 200)):
                    name = f"{step}-{task}-{number}"
                    store.add_rollout(name, task=task, step=step, split="train", group=f"{step}-{task}")
                    for call in run.calls:
                        store.record(name, call)
                    store.finish_rollout(name, output=None, seconds=1.0)
            # The learner left the group without contrast out.
            store.add_step(step, {"tokens": 220.0})
    found, expected = measured(tmp_path), assumed(8, 4, calls=3, prompt=100, sampled=10)
    for name in ("prompts", "prefill", "decode"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert mine.count == theirs.count
        assert mine.context == pytest.approx(theirs.context, abs=1)
    assert (found.runs, found.calls, found.largest) == (8, 24, expected.largest)
    assert found.learner.count == expected.learner.count / 2 == 220
    assert found.targets == expected.targets / 2
    assert "2 steps" in found.source and "tiny" in found.source


def test_runs_of_a_step_that_was_interrupted_are_not_counted_twice(tmp_path):
    with Store(tmp_path / "run.sqlite") as store:
        for attempt in ("interrupted", "trained"):
            for number, run in enumerate(agents(4, 3, 100, 10)):
                name = f"{attempt}-{number}"
                store.add_rollout(name, task=0, step=1, split="train", group=attempt)
                for call in run.calls:
                    store.record(name, call)
                store.finish_rollout(name, output=None, seconds=1.0)
        store.add_step(1, {"tokens": 220.0, "trajectories": 4.0})
    found = measured(tmp_path)
    assert (found.runs, found.calls, found.decode.count, found.learner.count) == (4, 12, 120, 220)


def test_a_folder_without_steps_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no run\.sqlite"):
        measured(tmp_path)
    Store(tmp_path / "run.sqlite").close()
    with pytest.raises(ConfigError, match="no finished training step"):
        measured(tmp_path)


def test_seconds_and_dollars_need_a_gpu_with_a_name():
    work = assumed(64, 8, calls=3, prompt=1000, sampled=150)
    unnamed = cost(plan(setup(gpu=find_gpu("80GB"))), work, 2.0)
    assert unnamed.seconds is None and unnamed.dollars is None and unnamed.flops > 0
    named = cost(plan(setup()), work, 2.0)
    assert named.seconds == pytest.approx(sum(it.seconds for it in named.parts))
    assert named.dollars == pytest.approx(named.seconds / 3600 * 2.0)
    ahead = cost(plan(setup(staleness=1)), work)
    assert ahead.seconds == pytest.approx(max(ahead.parts[0].seconds + ahead.parts[1].seconds, ahead.parts[2].seconds))


def test_the_cache_is_read_as_fast_as_all_gpus_can():
    """Each of two reads half of the weights and half of the keys and values."""
    work = assumed(64, 8, calls=3, prompt=6000, sampled=150)
    one, two = (cost(plan(setup(gpus=gpus, context=8192, staleness=1)), work) for gpus in (1, 2))
    assert one.batch == two.batch == 64
    assert two.parts[1].seconds == pytest.approx(one.parts[1].seconds / 2)


def test_shared_prefixes_spare_prompts():
    work = assumed(64, 8, calls=3, prompt=1000, sampled=150)
    found = cost(plan(setup()), work)
    assert found.unshared > 20 * found.parts[0].flops


def test_an_adapter_costs_two_thirds_of_all_weights():
    work = replace(assumed(8, 8, calls=1, prompt=1000, sampled=100), targets=0, learner=Tokens(1000, 0))
    full = learner_flops(plan(setup(lora_rank=0)), work)
    assert full == pytest.approx(6 * QWEN.linear_weights * 1000, rel=0.34)
    adapter = learner_flops(plan(setup(learner="torch")), work)
    assert 4 * QWEN.linear_weights * 1000 < adapter < full
