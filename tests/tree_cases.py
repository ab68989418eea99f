"""Small random models of several families, and calls that fork; for the tests of the learner."""

import torch
import transformers

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
PATH_FAMILIES = {
    "mamba": (transformers.MambaConfig, {"state_size": 4}),
    "bloom": (transformers.BloomConfig, {"n_layer": 2, "n_head": 4}),
    "qwen3-next": (
        transformers.Qwen3NextConfig,
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
        },
    ),
}


def make_model(family, dtype=torch.float64, **fields):
    make_config, own = (TREE_FAMILIES | PATH_FAMILIES)[family]
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
