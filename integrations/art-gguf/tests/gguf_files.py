"""Writes GGUF files of small random models, as llama.cpp's converter would."""

from pathlib import Path

import gguf
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>"]
DEFINED = ["<tool_call>", "</tool_call>"]
MERGES = ["1 2", "Ġ Ġ", "a b"]
"""The first one is never used if each digit is a word of its own."""
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary() -> list[str]:
    return [*SPECIAL, *DEFINED, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def small_model(kind: str = "llama") -> PreTrainedModel:
    torch.manual_seed(0)
    make_config, make_model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[kind]
    config = make_config(
        vocab_size=len(vocabulary()), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return make_model(config).eval()


def write_gguf(file: Path, model: PreTrainedModel, rule: str = "smollm", kind: str = "gpt2") -> Path:
    config = model.config
    writer = gguf.GGUFWriter(file, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(vocabulary())
    kinds = dict.fromkeys(SPECIAL, gguf.TokenType.CONTROL) | dict.fromkeys(DEFINED, gguf.TokenType.USER_DEFINED)
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in vocabulary()])
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}[config.model_type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        for projection, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            # llama.cpp rotates neighbouring numbers, transformers the two halves.
            if projection in name and config.model_type == "llama":
                tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
