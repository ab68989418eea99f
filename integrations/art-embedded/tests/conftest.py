"""Small models of several families with random weights, and a small tokenizer, saved as a user's folders would be."""

from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from art_core.config import TrainConfig
from art_embedded.engine import EmbeddedEngine

# Threads that wait for each other on shared cores make operations of microseconds take milliseconds.
torch.set_num_threads(1)

TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}{{- '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 8.0,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0, 4.0, 5.0, 6.0],
    "original_max_position_embeddings": 64,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    text = 'the weather in Rome is {"name": "get_weather", "arguments": {"city": "Rome"}} user assistant system tool'
    tokenizer.train_from_iterator([text] * 10, trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False) for marker in ("<tool_call>", "</tool_call>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def make_model(family: str, vocab_size: int):
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": vocab_size}
    windows = ["sliding_attention", "full_attention", "sliding_attention"]
    makers = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)),
        "qwen3_moe": lambda: Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
        ),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**sizes)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes)),
        "longrope": lambda: LlamaForCausalLM(LlamaConfig(**sizes, rope_parameters=LONGROPE)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**sizes, sliding_window=16)),
        "gemma3": lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(**sizes, sliding_window=16, layer_types=windows, query_pre_attn_scalar=8)
        ),
        "gemma2": lambda: Gemma2ForCausalLM(
            Gemma2Config(**sizes, sliding_window=16, layer_types=windows, query_pre_attn_scalar=8)
        ),
        "gpt_oss": lambda: GptOssForCausalLM(
            GptOssConfig(**sizes, sliding_window=16, layer_types=windows, num_local_experts=4, num_experts_per_tok=2)
        ),
        "qwen3_5": lambda: Qwen3_5ForCausalLM(
            Qwen3_5TextConfig(
                **{**sizes, "initializer_range": 0.1},  # more makes the recurrence multiply rounding
                layer_types=["linear_attention", "full_attention", "linear_attention"],
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                linear_num_key_heads=4,
                linear_num_value_heads=4,
            )
        ),
        "bloom": lambda: BloomForCausalLM(
            BloomConfig(
                vocab_size=vocab_size, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.3, eos_token_id=2
            )
        ),
        "mamba": lambda: MambaForCausalLM(
            MambaConfig(vocab_size=vocab_size, hidden_size=32, num_hidden_layers=2, state_size=8, eos_token_id=2)
        ),
    }
    return makers[family]().eval()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def save_model(tmp_path_factory):
    """A function family -> folder with a model and the tokenizer."""
    folders: dict[str, str] = {}

    def save(family: str = "qwen3") -> str:
        if family not in folders:
            folder = tmp_path_factory.mktemp(family)
            tokenizer = make_tokenizer()
            make_model(family, len(tokenizer)).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            folders[family] = str(folder)
        return folders[family]

    return save


@pytest.fixture
def save_with(tmp_path):
    """A function tokenizer -> folder with a model and this tokenizer."""

    def save(tokenizer: PreTrainedTokenizerFast, family: str = "qwen3") -> str:
        make_model(family, len(tokenizer)).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        return str(tmp_path)

    return save


@pytest.fixture
async def open_engine(save_model):
    """A function that starts an engine, from a folder or for a family; all are stopped at the end of the test."""
    engines: list[EmbeddedEngine] = []

    async def open_(family: str = "qwen3", *, folder: str | None = None, **settings) -> EmbeddedEngine:
        engine = EmbeddedEngine(folder or save_model(family), TrainConfig(**settings))
        await engine.start()
        engines.append(engine)
        return engine

    yield open_
    for engine in engines:
        await engine.stop()
