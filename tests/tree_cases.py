"""Small random models of several families, calls that fork, and the comparison of a tree with them; for tests of the learner."""

import torch
import transformers
from hypothesis import strategies as st

from art_core.learner.tree_forward import tree_outputs
from art_core.token_tree import build_tree
from art_core.types import Call, Trajectory

VOCAB = 12
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TREE_FAMILIES = {
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": True}),
    "qwen2": (transformers.Qwen2Config, {}),
    "llama": (transformers.LlamaConfig, {}),
    "gemma": (transformers.GemmaConfig, {}),
    "gemma2 with a cap": (
        transformers.Gemma2Config,
        {
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 4,
            "sliding_window": 4,
        },
    ),
    "granite with a scale": (transformers.GraniteConfig, {"logits_scaling": 3.0}),
    "qwen3 with experts": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1},
    ),
    "deepseek-v3 with experts": (
        transformers.DeepseekV3Config,
        {
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 4,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt-oss with experts": (
        transformers.GptOssConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3},
    ),
    "mistral with a window": (transformers.MistralConfig, {"sliding_window": 3}),
    "gemma3 with a window": (
        transformers.Gemma3TextConfig,
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 4},
    ),
    "qwen2 with a window in one layer": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]},
    ),
}
HYBRID_FAMILIES = {
    "qwen3-next": (
        transformers.Qwen3NextConfig,
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 0,
        },
    ),
    "qwen3.5": (
        transformers.Qwen3_5TextConfig,
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "olmo-hybrid": (
        transformers.OlmoHybridConfig,
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
        },
    ),
    "kimi-linear": (
        transformers.KimiLinearConfig,
        {
            "layer_types": ["linear_attention", "full_attention"],
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 4,
            "num_key_value_heads": 4,
            "linear_attn_config": {"num_heads": 4, "head_dim": 4, "short_conv_kernel_size": 4},
            "first_k_dense_replace": 2,
        },
    ),
    "granite-hybrid": (
        transformers.GraniteMoeHybridConfig,
        {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 24,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 8,
        },
    ),
    "nemotron-h": (
        transformers.NemotronHConfig,
        {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 4,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "falcon-h1": (
        transformers.FalconH1Config,
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 4,
            "mamba_n_groups": 2,
            "mamba_chunk_size": 8,
        },
    ),
    "jamba": (
        transformers.JambaConfig,
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 3,
        },
    ),
    "lfm2": (transformers.Lfm2Config, {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
}
HYBRID_FAMILIES["granite-hybrid with experts"] = (
    transformers.GraniteMoeHybridConfig,
    HYBRID_FAMILIES["granite-hybrid"][1] | {"num_local_experts": 4, "num_experts_per_tok": 2},
)
PATH_FAMILIES = {
    "mamba": (transformers.MambaConfig, {"state_size": 4}),
    "bloom": (transformers.BloomConfig, {"n_layer": 2, "n_head": 4}),
}


def make_model(family, dtype=torch.float64, **fields):
    make_config, own = (TREE_FAMILIES | HYBRID_FAMILIES | PATH_FAMILIES)[family]
    torch.manual_seed(0)
    config = make_config(**{**SIZES, **own, **fields})
    attention = "eager" if "cap" in family else None  # the other attentions leave the cap out
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def make_call(prompt, sampled, **fields):
    return Call(prompt_ids=tuple(prompt), sampled_ids=tuple(sampled), logprobs=(-2.0,) * len(sampled), **fields)


FORKED = [
    Trajectory(task="t", calls=(make_call([3, 4, 5], [6, 7]), make_call([3, 4, 5, 6, 7, 8], [9, 10, 3]))),
    Trajectory(task="t", calls=(make_call([3, 4, 5], [6, 8], temperature=0.7), make_call([3, 4], [5, 6, 8, 4]))),
    Trajectory(task="t", calls=(make_call([9, 3, 3, 4, 4, 5, 5], [6], finish_reason="aborted"),)),
]


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
        scores = (logits / (call.temperature or 1.0)).log_softmax(-1)
        rows.append(scores[range(len(call.sampled_ids)), list(call.sampled_ids)])
    return torch.cat(rows)


def gradient(model, logprobs):
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def check_equals_call_by_call(model, trajectories, **how):
    tree = build_tree(trajectories)
    ours, theirs = tree_outputs(model, tree, **how).logprobs, logprobs_call_by_call(model, trajectories)
    assert ours.shape == (tree.num_targets,) and ours.dtype == model.dtype
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    ours, theirs = gradient(model, ours), gradient(model, theirs)
    # Norms and rotary angles are float32 in any model; targets that cancel leave only that rounding.
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm() + 1e-5
