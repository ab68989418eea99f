"""Qwen3 and Qwen3.5 models with random weights, by size."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

SHAPES = {
    "toy": (32, 64, 2, 2, 1, 16),
    "tiny": (256, 768, 4, 4, 2, 64),
    "30m": (512, 1536, 10, 8, 4, 64),
    "0.6b": (1024, 3072, 28, 16, 8, 128),
    "4b": (2560, 9728, 36, 32, 8, 128),
}
"""Hidden size, MLP width, layers, heads, key heads, head size. The last two are those of Qwen3-0.6B and Qwen3-4B."""
QWEN3_VOCABULARY = 151_936
HYBRID = "qwen3.5-"
"""Before a size: three of four layers are Gated DeltaNet, with as many heads as attention has, as in Qwen3.5."""


def random_model(
    size: str,
    vocabulary: int,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attention: str = "sdpa",
) -> PreTrainedModel:
    """Return a model of ``SHAPES[size]`` with tied embeddings; the same weights for the same arguments."""
    hidden, mlp, layers, heads, key_heads, head = SHAPES[size.removeprefix(HYBRID)]
    kind, make, linear = Qwen3Config, Qwen3ForCausalLM, {}
    if size.startswith(HYBRID):
        kind, make = Qwen3_5TextConfig, Qwen3_5ForCausalLM
        linear = {
            "linear_num_key_heads": heads,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": head,
            "linear_value_head_dim": head,
        }
    config = kind(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=head, max_position_embeddings=40_960,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=2, pad_token_id=0, attn_implementation=attention,
        **linear,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return make._from_config(config, dtype=dtype).train()
