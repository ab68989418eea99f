"""Models whose layers carry a state compute the token tree as every call on its own, each token once."""

import functools
import inspect
import sys

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tree_cases import (
    FORKED,
    HYBRID_FAMILIES,
    SIZES,
    check_equals_call_by_call,
    make_call,
    make_model,
    trajectory_lists,
)

from art_core.learner import tree_logprobs
from art_core.learner.tree_forward import way_of
from art_core.token_tree import build_tree
from art_core.types import Trajectory
from art_hybrid import forked_states
from art_hybrid.seams import FUSED, SEAMS, follow_trees

QUICK = ("qwen3.5", "granite-hybrid", "lfm2")
"""One of each kind of layer; the others take longer than tests that are run all day may."""
FLOAT32 = ("nemotron-h", "granite-hybrid with experts")
"""Nemotron-H's head is float32 in any model, and experts have no float64."""
FAMILIES = [it if it in QUICK else pytest.param(it, marks=pytest.mark.system) for it in HYBRID_FAMILIES]


def model_in(family):
    return make_model(family, dtype=torch.float32 if family in FLOAT32 else torch.float64)


def in_float64(function):
    """Return transformers' function with sums in float64; it computes in float32 whatever the model's type is."""
    _, source = inspect.getsource(function).split("\n", 1)  # without the decorator
    scope = dict(vars(sys.modules[function.__module__]))
    exec(source.replace("torch.float32", "torch.float64").replace(".float()", ".double()"), scope)
    return scope[function.__name__]


@pytest.fixture(scope="module")
def model_of():
    """Makes a family's model, and its rows exact. In float32 they round as a tree does, which a model this small multiplies."""
    with pytest.MonkeyPatch.context() as patch:

        @functools.cache
        def make_exact(module):
            for name in SEAMS.keys() - {"causal_conv1d_fn", FUSED}:
                if function := getattr(module, name, None):
                    patch.setattr(module, name, in_float64(inspect.unwrap(function)))

        @functools.cache
        def make(family):
            model = model_in(family)
            make_exact(sys.modules[type(model).__module__])
            follow_trees(model)
            return model

        yield make


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15)
@given(trajectories=trajectory_lists(), tokens=st.none() | st.integers(1, 9))
def test_one_pass_over_the_tree_equals_training_every_call_on_its_own(model_of, family, trajectories, tokens):
    check_equals_call_by_call(model_of(family), trajectories, max_tokens=tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_token_of_the_tree_is_computed_once(family):
    model, tree, computed = model_in(family), build_tree(FORKED), []
    assert (way_of(model).backend, way_of(model).pieces) == ("segments", True)
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: computed.append(inputs[0].numel()))
    tree_logprobs(model, tree)
    assert computed == [tree.num_tokens]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_model_are_computed_as_before(family):
    model, ids = model_in(family), torch.tensor([[3, 4, 5, 6, 7]])
    before = model(input_ids=ids).logits
    tree_logprobs(model, build_tree(FORKED))
    assert torch.equal(model(input_ids=ids).logits, before)
    assert torch.equal(model(input_ids=ids, seq_idx=None).logits, before)


def long_trajectories():
    """Segments of several chunks, most with a shorter last one."""
    ids = [3 + (7 * place + place // 5) % 9 for place in range(150)]
    first, second = make_call(ids[:50], ids[50:83]), make_call(ids[:83] + ids[:21], ids[30:61])
    fork = make_call(ids[:67] + ids[5:9], ids[100:140])
    return [
        Trajectory(task="t", calls=(first, second)),
        Trajectory(task="t", calls=(fork, make_call(ids[9:40], ids[:19]))),
    ]


@pytest.mark.parametrize("tokens", [None, 7, 33])
@pytest.mark.parametrize("family", FAMILIES)
def test_long_segments_are_computed_as_in_rows(model_of, family, tokens):
    check_equals_call_by_call(model_of(family), long_trajectories(), max_tokens=tokens)


def test_a_model_that_loses_the_plan_on_the_way_to_its_layers_is_computed_path_by_path():
    sizes = SIZES | {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 2, "chunk_size": 8}
    torch.manual_seed(0)
    model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes)).eval()
    assert way_of(model).backend == "segments", "the layers get it from the backbone, which the chunked head calls"
    check_equals_call_by_call(model, long_trajectories())
    assert way_of(model.bfloat16()).backend == "paths", "the whole model drops it"


def test_a_model_that_passes_nothing_on_to_its_layers_is_not_planned():
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**SIZES, state_size=4)).eval()
    assert forked_states(model) is None and way_of(model).backend == "paths"


@pytest.mark.system
@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_flex_attention_gets_its_mask_beside_layers_with_a_state():
    with torch.no_grad():  # it has no backward pass on CPUs
        assert way_of(make_model("qwen3.5", dtype=torch.float32), "flex").backend == "flex"


def test_an_adapted_model_takes_the_tree_too(model_of):
    model_of("qwen3.5")
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(make_model("qwen3.5"), config).eval()
    check_equals_call_by_call(model, FORKED)
    check_equals_call_by_call(model, FORKED, max_tokens=4)


@pytest.mark.parametrize("family", ["qwen3.5", "jamba"])
@pytest.mark.parametrize("tokens", [None, 7])
def test_layers_that_are_checkpointed_follow_the_tree_once_more_in_the_backward_pass(model_of, family, tokens):
    model_of(family)
    model = make_model(family).train()
    model.gradient_checkpointing_enable()
    check_equals_call_by_call(model, FORKED)
