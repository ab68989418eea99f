"""A tiny model with random weights for each family: its architecture, special tokens and chat template, as a folder on disk.

The tests and ``bench.family_loop`` run them end to end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from bench import family_templates as templates

TEXT = 'system user assistant tool What is the weather in Rome? {"name": "get_weather", "arguments": {"city": "Rome"}} functions.'
VOCABULARY = 320
"""Without the special tokens."""
LIKELY = 5.0
"""Approximate logit of the token that ends a turn; it is then a few per cent of all tokens."""
SIZES: dict[str, Any] = {  # heads of 32, because vLLM's attention on CPUs has no smaller ones
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
DEEPSEEK = {
    "num_key_value_heads": 2, "q_lora_rank": 32,
    "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "head_dim": 64,
    "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
"""Latent attention of the published width, the only one for which vLLM has kernels; a dense layer, and one with routed and
shared experts."""
YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "original_max_position_embeddings": 64}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
KIMI_TOKENS = (
    "[BOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
DEEPSEEK_WRITTEN = {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
}
"""Fields of these models' ``config.json`` that vLLM reads and transformers' own classes don't write."""


@dataclass(frozen=True)
class Family:
    """One family; ``config`` is the name of its class in transformers."""

    config: str
    template: str
    end: str
    """The token that ends a turn."""
    tokens: tuple[str, ...] = ()
    """Further special tokens."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    """Written over the saved ``config.json``."""
    thinks: bool = False


CHATML = ("<|endoftext|>", "<|im_start|>")
LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>")
MISTRAL_TOKENS = (
    "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
)  # fmt: skip


def _chatml(config: str, template: str = templates.CHATML, thinks: bool = False, **sizes: Any) -> Family:
    return Family(config, template, "<|im_end|>", CHATML, sizes, thinks=thinks)


def _gemma(config: str) -> Family:
    windows = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    return Family(config, templates.GEMMA, "<end_of_turn>", ("<bos>", "<eos>", "<start_of_turn>"), windows)


FAMILIES: dict[str, Family] = {
    "qwen2.5": _chatml("Qwen2Config"),
    "qwen3": _chatml("Qwen3Config", templates.QWEN3, thinks=True),
    "llama3": Family("LlamaConfig", templates.LLAMA3, "<|eot_id|>", LLAMA_TOKENS, {"rope_parameters": LLAMA3_ROPE}),
    "kimi-k2": Family(
        "DeepseekV3Config", templates.KIMI, "<|im_end|>", KIMI_TOKENS, DEEPSEEK | {"rope_parameters": YARN},
        {"model_type": "kimi_k2", **DEEPSEEK_WRITTEN},
    ),
    "moonlight": Family(
        "DeepseekV3Config", templates.MOONLIGHT, "<|im_end|>", KIMI_TOKENS, DEEPSEEK | {"q_lora_rank": None},
        DEEPSEEK_WRITTEN,
    ),
    "qwen3-moe": _chatml("Qwen3MoeConfig", templates.QWEN3, thinks=True, **EXPERTS),
    "mistral": Family("MistralConfig", templates.MISTRAL, "</s>", MISTRAL_TOKENS, {"sliding_window": None}),
    "gemma2": _gemma("Gemma2Config"),
    "gemma3": _gemma("Gemma3TextConfig"),
    "phi3": _chatml("Phi3Config"),
    "granite": Family("GraniteConfig", templates.GRANITE, "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>")),
    "olmo2": _chatml("Olmo2Config"),
    "gpt2": _chatml("GPT2Config", n_embd=64, n_layer=2, n_head=2, n_positions=2048),
    "gpt-oss": _chatml("GptOssConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
    "lfm2": _chatml("Lfm2Config", layer_types=["conv", "full_attention"], block_multiple_of=16),
    "qwen3-next": _chatml(
        "Qwen3NextConfig", layer_types=["linear_attention", "full_attention"], linear_key_head_dim=8,
        linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, shared_expert_intermediate_size=32, **EXPERTS,
    ),
    "granite-hybrid": _chatml(
        "GraniteMoeHybridConfig", layer_types=["mamba", "attention"], mamba_d_head=32, mamba_n_heads=4, mamba_d_state=8,
        mamba_n_groups=1, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32, position_embedding_type="rope",
    ),
    "jamba": _chatml(
        "JambaConfig", attn_layer_period=2, attn_layer_offset=1, num_experts=1, mamba_d_state=8, mamba_dt_rank=4,
    ),
    "mamba": _chatml("MambaConfig", state_size=8),
}  # fmt: skip


def save(name: str, folder: Path, *, seed: int = 0, **sizes: Any) -> str:
    """Write the tiny model of a family with its tokenizer; return the folder. ``sizes`` change its config."""
    family = FAMILIES[name]
    tokenizer = make_tokenizer(family)
    model = make_model(family, tokenizer, seed, sizes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = Path(folder) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | dict(family.written), indent=2))
    return str(folder)


def make_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the family's special tokens and template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [*family.tokens, family.end]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY + len(special), special_tokens=special, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([TEXT] * 10, trainer)
    marks = [mark for mark in ("<tool_call>", "</tool_call>", "<think>", "</think>") if mark in family.template]
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=family.end, chat_template=family.template)


def make_model(
    family: Family, tokenizer: PreTrainedTokenizerFast, seed: int, sizes: Mapping[str, Any]
) -> PreTrainedModel:
    """Return the model. Its answers are short: it often thinks, ends turns and thinking soon, and writes little white space, of
    which grammars allow any amount."""
    ids = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    config = getattr(transformers, family.config)(**{**SIZES, **family.sizes, **ids, **sizes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    blank = [token for token in range(len(tokenizer)) if not tokenizer.decode([token]).strip()]
    likely = dict.fromkeys(tokenizer.convert_ids_to_tokens(blank), -LIKELY) | {family.end: LIKELY}
    if family.thinks:
        likely |= {"<think>": LIKELY + 2, "</think>": LIKELY - 1}
    with torch.no_grad():
        # One direction is nearly the same in every hidden state.
        model.get_input_embeddings().weight[:, 0] = 4.0
        hidden = model.base_model(torch.arange(64)[None])[0][0, :, 0].mean()
        for token, logit in likely.items():
            model.get_output_embeddings().weight[tokenizer.convert_tokens_to_ids(token), 0] = logit / hidden
    return model
