"""tree_logprobs: one pass over the tree equals training every call on its own."""

import threading

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tree_cases import (
    FORKED,
    PATH_FAMILIES,
    SIZES,
    TREE_FAMILIES,
    VOCAB,
    check_equals_call_by_call,
    make_call,
    make_model,
    trajectory_lists,
)

from art_core.errors import ConfigError
from art_core.learner import tree_logprobs
from art_core.learner.tree_attention import filled, only_rows
from art_core.learner.tree_forward import tree_outputs, way_of
from art_core.learner.tree_support import Support, TreeMask, flex_blocks, support
from art_core.token_tree import build_tree
from art_core.types import Trajectory

MODELS = {name: make_model(name) for name in TREE_FAMILIES if "window" in name or name == "qwen3"}


@pytest.mark.parametrize("family", ["qwen3", "mistral with a window", "gemma3 with a window"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trajectories=trajectory_lists())
def test_one_pass_over_the_tree_equals_training_every_call_on_its_own(family, trajectories):
    check_equals_call_by_call(MODELS[family], trajectories)


@pytest.mark.smoke
@pytest.mark.system
@settings(max_examples=25, deadline=None)
@given(trajectories=trajectory_lists(), tokens=st.integers(1, 9), again=st.booleans(), gap=st.sampled_from([0, 1, 16]))
def test_pieces_of_any_size_change_nothing(trajectories, tokens, again, gap):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("art_core.learner.tree_attention.SMALL_GAP", gap)
        patch.setattr("art_core.learner.tree_forward.CACHE_FRIENDLY", 24 * tokens)
        check_equals_call_by_call(
            MODELS["qwen2 with a window in one layer"], trajectories, max_tokens=tokens if again else None
        )


@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_every_family_is_a_tree_in_one_piece_and_in_several(family):
    model = make_model(family, dtype=torch.float32 if "experts" in family else torch.float64)
    check_equals_call_by_call(model, FORKED)
    check_equals_call_by_call(model, FORKED, max_tokens=4)
    how = support(model, None, compute=None)
    assert how.trims is ("cap" not in family and "gpt-oss" not in family)
    assert (how.backend, how.head, how.pieces) == ("dense" if "cap" in family else "segments", True, True)


@pytest.mark.parametrize("backend", ["dense", "paths"])
def test_the_other_backends_compute_the_same(backend):
    check_equals_call_by_call(MODELS["mistral with a window"], FORKED, backend=backend)


def test_a_backend_that_a_model_cannot_be_computed_with_is_refused_by_name():
    with pytest.raises(ConfigError, match="BloomForCausalLM cannot compute a token tree with backend='segments'"):
        tree_logprobs(make_model("bloom", dtype=torch.float32), build_tree(FORKED), backend="segments")
    with pytest.raises(ConfigError, match="backend='fast' is unknown; use one of: segments, flex, dense, paths"):
        tree_logprobs(make_model("qwen3"), build_tree(FORKED), backend="fast")


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_a_tree_that_outgrows_a_length_dependent_rotary_embedding_is_computed_path_by_path(rope, caplog):
    fields = {"rope_type": rope, "rope_theta": 100.0, "factor": 4.0}
    if rope == "longrope":
        fields |= {"short_factor": [1.0, 1.0], "long_factor": [3.0, 7.0], "original_max_position_embeddings": 20}
    model = make_model("llama", rope_parameters=fields, max_position_embeddings=20 if rope == "dynamic" else 80)
    check_equals_call_by_call(model, FORKED)
    assert "path by path" not in caplog.text
    check_equals_call_by_call(model, [Trajectory(task="t", calls=(make_call([3, 4, 5] * 7, [6, 7]),))], max_tokens=8)
    assert "beyond 20 positions" in caplog.text


def test_a_model_that_sees_later_tokens_is_refused():
    config = transformers.BertConfig(**{**SIZES, "is_decoder": False})
    model = transformers.BertLMHeadModel(config).eval()
    with pytest.raises(ConfigError, match="BertLMHeadModel is not causal as configured"):
        tree_logprobs(model, build_tree(FORKED))


def test_plain_rows_of_a_model_with_sinks_or_a_cap_are_refused_by_the_tree_s_attention():
    model = make_model("gpt-oss with experts", dtype=torch.float32)
    model.config._attn_implementation = "art_tree"
    with pytest.raises(NotImplementedError, match="set_attn_implementation"):
        model(input_ids=torch.tensor([[3, 4, 5]]))


def test_pieces_are_computed_by_the_name_that_the_model_has_for_its_cache():
    model = make_model("qwen3").eval()
    expected = tree_logprobs(model, tree := build_tree(FORKED))
    decoder, names = model.get_decoder(), set[str]()
    forward = decoder.forward

    def renamed(input_ids=None, attention_mask=None, position_ids=None, cache=None, **others):
        names.update(["cache"] * (cache is not None))
        given = {"past_key_values": cache, **others} if cache is not None else others
        return forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **given)

    decoder.forward = renamed  # as from transformers 5.24 on
    pieces = tree_outputs(model, tree, max_tokens=5).logprobs
    torch.testing.assert_close(pieces, expected)
    assert "cache" in names


def test_the_model_s_attention_is_restored():
    model = make_model("qwen3").train()
    model.set_attn_implementation("eager")
    tree_logprobs(model, build_tree(FORKED))
    assert model.config._attn_implementation == "eager" and model.training


def test_layers_that_are_checkpointed_attend_to_the_tree_once_more_in_the_backward_pass():
    model = make_model("qwen3").train()
    model.gradient_checkpointing_enable()
    check_equals_call_by_call(model, FORKED)


@pytest.mark.parametrize("family", PATH_FAMILIES)
def test_a_model_whose_attention_cannot_be_a_tree_is_computed_path_by_path(family, caplog):
    model = make_model(family, dtype=torch.float32)  # experts have no float64
    check_equals_call_by_call(model, FORKED)
    check_equals_call_by_call(model, FORKED, max_tokens=3)
    assert caplog.text.count("cannot follow a token tree") == 1


def test_an_adapted_model_takes_the_tree_too():
    model = make_model("qwen3")
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    check_equals_call_by_call(get_peft_model(model, config).eval(), FORKED)


def test_chunks_of_the_vocabulary_projection_change_nothing(monkeypatch):
    monkeypatch.setattr("art_core.learner.head.CHUNK", 2 * VOCAB)
    check_equals_call_by_call(make_model("qwen3"), FORKED)


def test_the_entropy_is_that_of_each_distribution_that_was_sampled_from():
    model, call = make_model("gemma2 with a cap"), make_call([3, 4], [5, 6], temperature=0.5)
    logprobs = (model(input_ids=torch.tensor([[3, 4, 5, 6]])).logits[0, 1:3] / 0.5).log_softmax(-1)
    outputs = tree_outputs(model, build_tree([Trajectory(task="t", calls=(call, call))]))
    expected = -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(outputs.entropy, torch.cat([expected, expected]), rtol=1e-5, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(trajectories=trajectory_lists(), window=st.sampled_from([None, 2, 5]), data=st.data())
def test_the_block_mask_holds_what_the_dense_mask_shows(trajectories, window, data):
    tree = build_tree(trajectories)
    start = data.draw(st.integers(0, tree.num_tokens - 1))
    stop, windows = data.draw(st.integers(start + 1, tree.num_tokens)), {"full_attention": window}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("art_core.learner.tree_support.FLEX_BLOCK", 4)
        masks = TreeMask(tree, Support("dense", windows=windows), torch.float32, torch.device("cpu"))
        seen = masks.rows(start, stop)[0, 0].numpy() == 0
        some, whole = flex_blocks(masks.depths, masks.ends, start, stop, masks.windows["full_attention"])
        for i, j in np.ndindex(some.shape):
            block = seen[4 * i : 4 * i + 4, 4 * j : 4 * j + 4]
            assert block.all() if whole[i, j] else some[i, j] or not block.any()
            assert not (some[i, j] and whole[i, j])
        flex = TreeMask(tree, Support("flex", windows=windows), torch.float32, torch.device("cpu")).rows(start, stop)
        rows, columns = torch.meshgrid(torch.arange(stop - start), torch.arange(stop), indexing="ij")
        assert (flex.mask_mod(0, 0, rows, columns).numpy() == seen).all()
        assert flex.shape == (1, 1, stop - start, stop)


def test_weighted_only_leaves_out_what_is_not_trained():
    model, tree = make_model("qwen3"), build_tree(FORKED)
    every, some = tree_logprobs(model, tree), tree_logprobs(model, tree, weighted_only=True)
    torch.testing.assert_close(some, every[torch.from_numpy(tree.weights) != 0])


def test_a_tree_without_targets_has_no_logprobs():
    assert tree_logprobs(make_model("qwen3"), build_tree([])).shape == (0,)


def test_the_last_layer_computes_only_the_rows_that_predict_a_target(monkeypatch):
    monkeypatch.setattr("art_core.learner.tree_attention.SMALL_GAP", 0)
    model, tree, rows = make_model("qwen3"), build_tree(FORKED), []
    way_of(model)
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[1]))
    tree_logprobs(model, tree)
    assert rows == [tree.num_tokens, len(set(tree.target_contexts.tolist()))] and rows[1] < rows[0]
    assert model(input_ids=torch.tensor([[3, 4, 5]])).logits.shape == (1, 3, VOCAB)
    assert rows[2:] == [3, 3]


@given(rows=st.sets(st.integers(0, 60)), gap=st.integers(0, 20))
def test_small_gaps_between_needed_rows_are_filled_and_large_ones_are_not(rows, gap):
    expected = {it for it in range(61) if it in rows or gap_around(it, rows) <= gap}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("art_core.learner.tree_attention.SMALL_GAP", gap)
        assert filled(torch.tensor(sorted(rows), dtype=torch.int64)).tolist() == sorted(expected)


def gap_around(place, rows):
    before, after = [it for it in rows if it < place], [it for it in rows if it > place]
    return min(after) - max(before) - 1 if before and after else np.inf


def test_other_threads_compute_all_rows_while_a_tree_is_computed():
    model, ids = make_model("qwen3"), torch.tensor([[3, 4, 5, 6]])
    plain, found = model(input_ids=ids).logits, []
    with only_rows(model, torch.tensor([1])), only_rows(model, torch.tensor([2])):
        thread = threading.Thread(target=lambda: found.append(model(input_ids=ids).logits))
        thread.start()
        thread.join()
    torch.testing.assert_close(found, [plain])
    torch.testing.assert_close(model(input_ids=ids).logits, plain)


@pytest.mark.system
@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_layers_that_are_compiled_later_compute_the_tree_too():
    model = make_model("llama")
    way_of(model)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    check_equals_call_by_call(model, FORKED)
