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
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_call(prompt, sampled, **fields):
    return Call(prompt_ids=tuple(prompt), sampled_ids=tuple(sampled), logprobs=(-2.0,) * len(sampled), **fields)


FORKED = [
    Trajectory(task="t", calls=(make_call([3, 4, 5], [6, 7]), make_call([3, 4, 5, 6, 7, 8], [9, 10, 3]))),
    Trajectory(task="t", calls=(make_call([3, 4, 5], [6, 8], temperature=0.7), make_call([3, 4], [5, 6, 8, 4]))),
    Trajectory(task="t", calls=(make_call([9, 3, 3, 4, 4, 5, 5], [6], finish_reason="aborted"),)),
]
