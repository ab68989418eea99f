"""Models whose layers carry a state compute the token tree as every call on its own, each token once."""

import inspect
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tree_cases import FORKED, HYBRID_FAMILIES, check_equals_call_by_call, make_model, trajectory_lists

from art_core.learner import tree_logprobs
from art_core.learner.tree_forward import way_of
from art_core.token_tree import build_tree
from art_hybrid.seams import follow_trees

MODELS = {
    family: make_model(family, dtype=torch.float32 if family == "nemotron-h" else torch.float64)  # its head is float32
    for family in HYBRID_FAMILIES
}


def in_float64(function):
    """Return transformers' function with sums in float64; it computes in float32 whatever the model's type is."""
    _, source = inspect.getsource(function).split("\n", 1)  # without the decorator
    scope = dict(vars(sys.modules[function.__module__]))
    exec(source.replace("torch.float32", "torch.float64").replace(".float()", ".double()"), scope)
    return scope[function.__name__]


@pytest.fixture(scope="module", autouse=True)
def rows_in_float64():
    """Rows are the reference here. In float32 they round as much as a tree does, and such small models multiply that."""
    with pytest.MonkeyPatch.context() as patch:
        for module in {sys.modules[type(model).__module__] for model in MODELS.values()}:
            for name in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"):
                if function := getattr(module, name, None):
                    patch.setattr(module, name, in_float64(inspect.unwrap(function)))
        for model in MODELS.values():
            follow_trees(model)
        yield


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trajectories=trajectory_lists(), tokens=st.none() | st.integers(1, 9))
def test_one_pass_over_the_tree_equals_training_every_call_on_its_own(family, trajectories, tokens):
    check_equals_call_by_call(MODELS[family], trajectories, max_tokens=tokens)


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_every_token_of_the_tree_is_computed_once(family):
    model, tree, computed = make_model(family), build_tree(FORKED), []
    assert (way_of(model).backend, way_of(model).pieces) == ("segments", True)
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: computed.append(inputs[0].numel()))
    tree_logprobs(model, tree)
    assert computed == [tree.num_tokens]


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_rows_of_a_model_are_computed_as_before(family):
    model, ids = make_model(family), torch.tensor([[3, 4, 5, 6, 7]])
    before = model(input_ids=ids).logits
    tree_logprobs(model, build_tree(FORKED))
    assert torch.equal(model(input_ids=ids).logits, before)
    assert torch.equal(model(input_ids=ids, seq_idx=None).logits, before)


def test_an_adapted_model_takes_the_tree_too():
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(make_model("qwen3.5"), config).eval()
    check_equals_call_by_call(model, FORKED)
    check_equals_call_by_call(model, FORKED, max_tokens=4)


def test_layers_that_are_checkpointed_follow_the_tree_once_more_in_the_backward_pass():
    model = make_model("qwen3.5").train()
    model.gradient_checkpointing_enable()
    check_equals_call_by_call(model, FORKED)
