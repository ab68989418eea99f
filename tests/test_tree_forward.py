"""tree_logprobs: one pass over the tree equals training every call on its own."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tree_cases import FORKED, PATH_FAMILIES, TREE_FAMILIES, VOCAB, make_call, make_model

from art_core.learner import tree_logprobs
from art_core.token_tree import build_tree
from art_core.types import Trajectory


@st.composite
def trajectory_lists(draw, max_calls=4):
    """Calls that repeat, extend and fork from earlier ones, at several temperatures."""
    seen = [()]
    trajectories = []
    for _ in range(draw(st.integers(1, 3))):
        calls = []
        for _ in range(draw(st.integers(1, max_calls))):
            earlier = draw(st.sampled_from(seen))
            kept = earlier[: draw(st.integers(0, len(earlier)))]
            prompt = kept + tuple(draw(st.lists(st.integers(3, VOCAB - 1), min_size=0 if kept else 1, max_size=6)))
            sampled = tuple(draw(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=6)))
            temperature = draw(st.sampled_from([1.0, 1.0, 0.5]))
            calls.append(make_call(prompt, sampled, temperature=temperature))
            seen.append(prompt + sampled)
        trajectories.append(Trajectory(task="t", calls=tuple(calls)))
    return trajectories


def logprobs_call_by_call(model, trajectories):
    rows = []
    for call in (call for trajectory in trajectories for call in trajectory.calls):
        ids = torch.tensor([call.prompt_ids + call.sampled_ids])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(call.prompt_ids) - 1 : -1]
        scores = (logits.float() / (call.temperature or 1.0)).log_softmax(-1)
        rows.append(scores[range(len(call.sampled_ids)), list(call.sampled_ids)])
    return torch.cat(rows)


def gradient(model, logprobs):
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def check_equals_call_by_call(model, trajectories):
    tree = build_tree(trajectories)
    ours, theirs = tree_logprobs(model, tree), logprobs_call_by_call(model, trajectories)
    assert ours.shape == (tree.num_targets,) and ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    ours, theirs = gradient(model, ours), gradient(model, theirs)
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm() + 1e-7


@pytest.mark.parametrize("family", TREE_FAMILIES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trajectories=trajectory_lists())
def test_one_pass_over_the_tree_equals_training_every_call_on_its_own(family, trajectories):
    check_equals_call_by_call(make_model(family), trajectories)


@pytest.mark.parametrize("family", PATH_FAMILIES)
def test_a_model_whose_attention_cannot_be_a_tree_is_computed_path_by_path(family, caplog):
    model = make_model(family, dtype=torch.float32)  # experts have no float64
    check_equals_call_by_call(model, FORKED)
    check_equals_call_by_call(model, FORKED)
    assert caplog.text.count("cannot follow a token tree") == 1


@pytest.mark.parametrize("family", TREE_FAMILIES)
def test_eager_attention_takes_the_tree_too(family):
    check_equals_call_by_call(make_model(family, attn_implementation="eager"), FORKED)


def test_an_adapted_model_takes_the_tree_too():
    model = make_model("qwen3")
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    check_equals_call_by_call(get_peft_model(model, config).eval(), FORKED)


def test_chunks_of_the_vocabulary_projection_change_nothing(monkeypatch):
    monkeypatch.setattr("art_core.learner.tree_forward.CHUNK", 2 * VOCAB)
    check_equals_call_by_call(make_model("qwen3"), FORKED)


def test_weighted_only_leaves_out_what_is_not_trained():
    model, tree = make_model("qwen3"), build_tree(FORKED)
    every, some = tree_logprobs(model, tree), tree_logprobs(model, tree, weighted_only=True)
    torch.testing.assert_close(some, every[torch.from_numpy(tree.weights) != 0])


def test_a_tree_without_targets_has_no_logprobs():
    assert tree_logprobs(make_model("qwen3"), build_tree([])).shape == (0,)
