"""Shapes against the models themselves: transformers', PEFT's, what the embedded engine keeps, what is on disk."""

import json
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from art_core.errors import ConfigError
from art_core.learner.pretrained import load_config, positions
from art_embedded import TINY
from art_embedded.loading import make_key_values
from art_vllm.cost import forward_flops
from art_vllm.known_shapes import find_shape, known_shapes
from art_vllm.shapes import shape_of
from art_vllm.workload import Tokens

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
CONFIGS = {
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, a window in two layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": 16}),
    "granite": ("granite", {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 16, "num_experts": 8, **EXPERTS}),
    "qwen3_moe, a dense layer": ("qwen3_moe", {"num_experts": 8, "mlp_only_layers": [1], **EXPERTS}),
    "moonlight": (
        "deepseek_v3",
        {"q_lora_rank": None, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, **EXPERTS, **LATENT},
    ),
    "kimi_k2": (
        "deepseek_v3",
        {"q_lora_rank": 12, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, **EXPERTS, **LATENT},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        {"q_lora_rank": 12, "n_routed_experts": 8, "n_shared_experts": 1, **EXPERTS, **LATENT},
    ),
    "latent attention, all layers dense": ("deepseek_v3", {"q_lora_rank": 12, "first_k_dense_replace": 3, **LATENT}),
}  # fmt: skip
"""``model_type`` and what differs from SIZES."""


def config_of(name):
    family, others = CONFIGS[name]
    return AutoConfig.for_model(family, **{**SIZES, **others})


def build(name, device="meta") -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config_of(name))


def shape(name):
    return shape_of(json.loads(config_of(name).to_json_string(use_diff=False)), name)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_parameters_are_those_of_the_model(name):
    assert shape(name).parameters == build(name).num_parameters()


@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "latent attention, all layers dense"])
def test_the_adapter_is_pefts_all_linear(name):
    adapted = get_peft_model(build(name), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = sum(it.numel() for it in adapted.parameters() if it.requires_grad)
    assert shape(name).adapter_parameters(4) == trained


@pytest.mark.parametrize(
    "name",
    [name for name in CONFIGS if "moe" not in name and "mix" not in name and "moon" not in name and "kimi" not in name],
)
def test_a_forward_pass_takes_what_is_counted(name):
    model, tokens = build(name, "cpu").eval(), 8  # no more than a window: the model computes all pairs
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    head = 2 * tokens * SIZES["vocab_size"] * SIZES["hidden_size"]
    assert forward_flops(shape(name), Tokens(tokens, tokens)) + head == pytest.approx(
        counter.get_total_flops(), rel=0.002
    )


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "qwen3_moe", "moonlight", "kimi_k2"])
def test_the_embedded_engine_keeps_as_much_of_a_token(name):
    model = build(name, "cpu").eval()
    kept = make_key_values(model).token_bytes
    counted = shape(name)
    assert counted.layers * counted.cached_numbers(compressed=False) * model.dtype.itemsize == kept


def test_latent_attention_keeps_one_vector_and_the_rotary_part():
    assert shape("moonlight").cached_numbers() == 16 + 4
    assert find_shape("moonshotai/Kimi-K2-Instruct").cached_numbers() == 512 + 64


def test_a_window_bounds_what_is_kept():
    assert shape("qwen2, a window in two layers").cached_tokens(32) == 32 + 2 * 8
    assert shape("mistral").cached_tokens(64) == 3 * 16
    assert shape("qwen2").cached_tokens(1000) == 3000


def test_the_weights_are_as_large_as_their_file():
    file = TINY / "model.safetensors"
    with file.open("rb") as stream:
        header = 8 + int.from_bytes(stream.read(8), "little")
    assert 2 * find_shape("tiny").parameters == file.stat().st_size - header


PUBLISHED = {  # 10^9 parameters, by model cards and papers; how far rounding may take them
    "Qwen2.5-0.5B": 0.494, "Qwen2.5-1.5B": 1.54, "Qwen2.5-3B": 3.09, "Qwen2.5-7B": 7.61, "Qwen2.5-14B": 14.7,
    "Qwen2.5-32B": 32.5, "Qwen2.5-72B": 72.7, "Qwen3-0.6B": 0.596, "Qwen3-1.7B": 1.72, "Qwen3-4B": 4.02, "Qwen3-8B": 8.19,
    "Qwen3-14B": 14.8, "Qwen3-32B": 32.8, "Qwen3-30B-A3B": 30.5, "Qwen3-235B-A22B": 235, "Llama-3.1-8B": 8.03,
    "Llama-3.1-70B": 70.6, "Llama-3.1-405B": 405.9, "Llama-3.2-1B": 1.24, "Llama-3.2-3B": 3.21,
    "Llama-3.3-70B-Instruct": 70.6, "Mistral-7B-v0.3": 7.25, "Mistral-Nemo-Base-2407": 12.2, "Moonlight-16B-A3B": 16,
    "DeepSeek-V3": 671, "GLM-4.7-Flash": 29.95, "granite-4.2-3b": 3.66, "granite-4.2-8b": 8.79, "granite-4.2-30b": 29.28,
    "MiniCPM5-1B": 1.08, "MiniCPM5-2B": 2.52, "Nanbeige4.1-3B": 3.93,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_well_known_model_has_as_many_parameters_as_published(name):
    assert find_shape(name).parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


def test_most_base_models_of_qwen2_5_have_more_positions_than_the_others():
    found = {
        size: find_shape(f"Qwen/Qwen2.5-{size}").positions for size in ("0.5B", "3B", "7B", "Coder-7B", "7B-Instruct")
    }
    assert found == {"0.5B": 32768, "3B": 32768, "7B": 131072, "Coder-7B": 32768, "7B-Instruct": 32768}


def test_kimi_k2_has_about_as_many_parameters_as_published():
    shape = find_shape("moonshotai/Kimi-K2-Instruct")
    assert shape.parameters / 1e12 == pytest.approx(1.04, rel=0.015)  # arXiv 2507.20534, table 2
    assert shape.active / 1e9 == pytest.approx(32.6, rel=0.01)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("openbmb/MiniCPM5-1B", 1_080_632_832),
        ("openbmb/MiniCPM5-2B", 2_516_756_480),
        ("ibm-granite/granite-4.2-3b", 3_659_737_600),
        ("ibm-granite/granite-4.2-8b", 8_791_592_960),
        ("ibm-granite/granite-4.2-30b", 29_276_770_304),
    ],
)
def test_a_model_of_this_year_has_exactly_the_published_number_of_parameters(name, parameters):
    assert find_shape(name).parameters == parameters


@pytest.mark.parametrize(("name", "active"), [("Qwen3-30B-A3B", 3.3), ("Qwen3-235B-A22B", 22), ("DeepSeek-V3", 37.5)])
def test_a_mixture_of_experts_has_as_many_active_parameters_as_published(name, active):
    assert find_shape(name).active / 1e9 == pytest.approx(active, rel=0.02)


def test_the_parameters_of_a_well_known_model_are_those_of_its_config():
    for known in known_shapes():
        config = AutoConfig.for_model(
            {"kimi_k2": "deepseek_v3"}.get(known.family, known.family), **keys_of(known)
        )  # fmt: skip
        found = shape_of(json.loads(config.to_json_string(use_diff=False)), known.name)
        assert (found.parameters, found.adapter_parameters(8)) == (known.parameters, known.adapter_parameters(8))


def keys_of(known):
    """The keys of a config.json that say what a shape says."""
    keys = {
        "vocab_size": known.vocabulary, "hidden_size": known.hidden, "intermediate_size": known.feed_forward,
        "num_hidden_layers": known.layers, "num_attention_heads": known.heads, "num_key_value_heads": known.kv_heads,
        "max_position_embeddings": known.positions, "tie_word_embeddings": known.tied,
    }  # fmt: skip
    if not known.latent:
        keys["head_dim"] = known.head_size
    if known.experts:
        keys |= {"num_experts_per_tok": known.experts.per_token, "moe_intermediate_size": known.experts.width}
        keys["n_routed_experts" if known.latent else "num_experts"] = known.experts.count
    if known.latent:
        keys |= {
            "n_shared_experts": known.experts.shared // known.experts.width, "q_lora_rank": known.latent.query,
            "first_k_dense_replace": known.layers - known.experts.layers, "kv_lora_rank": known.latent.key_value,
            "qk_nope_head_dim": known.latent.plain, "qk_rope_head_dim": known.latent.rotary, "v_head_dim": known.latent.value,
        }  # fmt: skip
    return keys


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Llama-3.1-8B-Instruct"),
        ("unsloth/Qwen2.5-7B-Instruct-unsloth-bnb-4bit", "Qwen/Qwen2.5-7B-Instruct"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-8B"),
        ("moonshotai/Kimi-K2-Instruct-0905", "moonshotai/Kimi-K2-Instruct-0905"),
    ],
)
def test_a_name_is_found_whoever_repackaged_the_model(name, known):
    assert find_shape(name).name == known


def test_a_folder_needs_only_its_config(tmp_path):
    (tmp_path / "config.json").write_text(config_of("qwen3").to_json_string(use_diff=False))
    assert find_shape(str(tmp_path)).parameters == build("qwen3").num_parameters()


def test_the_local_cache_of_the_hub_is_read(tmp_path, monkeypatch):
    commit = "0" * 40
    repo = tmp_path / "models--someone--some-model"
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit / "config.json").write_text(config_of("llama").to_json_string(use_diff=False))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_shape("someone/some-model").family == "llama"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Qwen/Qwen2.5-7B-Instrukt", r"Did you mean Qwen/Qwen2\.5-7B-Instruct\b.*pass a folder"),
        ("mistral", "Did you mean mistralai/Mistral-7B-v0.3 or mistralai/Mistral-7B-Instruct-v0.3 or"),
    ],
)
def test_a_name_that_is_nearly_known_is_answered_with_the_known_ones(name, says):
    with pytest.raises(ConfigError, match=says):
        find_shape(name)


@pytest.mark.parametrize("name", ["google/gemma-2-9b", "meta-llama/Llama-4-Scout-17B", "allenai/Olmo-3-7B"])
def test_another_model_is_not_proposed_for_an_unknown_one(name):
    with pytest.raises(ConfigError, match=rf"hf download {name} config\.json") as refused:
        find_shape(name)
    assert "Did you mean" not in str(refused.value)


def test_a_plan_does_not_need_the_hubs_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert find_shape("Qwen/Qwen3-4B").family == "qwen3"


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find_shape(str(tmp_path))
    with pytest.raises(ConfigError, match="doesn't exist"):
        find_shape("./nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="can't be read"):
        find_shape(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="hidden_size=None"):
        find_shape(str(tmp_path))


LLAMA_WRITTEN = {"model_type": "llama", **SIZES}


def written(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return find_shape(str(folder))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_key_value_heads": -1}, "num_key_value_heads=-1"),
        ({"intermediate_size": "48"}, "intermediate_size='48'"),
        ({"num_attention_heads": 128}, "head_dim=None"),
        ({"num_local_experts": 8, "intermediate_size": None}, "intermediate_size=None"),
        ({"kv_lora_rank": 8}, "qk_nope_head_dim=None"),
    ],
)
def test_a_number_that_is_missing_or_none_is_refused_by_its_name(changes, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        written(tmp_path, {**LLAMA_WRITTEN, **changes})


@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "factor": 4.0}, {"type": "yarn", "factor": 4.0}])
def test_yarn_gives_as_many_positions_as_a_run_has(rope, tmp_path):
    rope |= {"original_max_position_embeddings": 128, "rope_theta": 1e4}
    shape = written(tmp_path, {**LLAMA_WRITTEN, "rope_scaling": rope})
    assert shape.positions == positions(load_config(tmp_path)) == 512


def test_the_language_model_of_gemma_3_is_counted_alone(tmp_path):
    """Its head is its embedding and some of its layers see all, where the config says neither."""
    inside = {**SIZES, "model_type": "gemma3_text", "sliding_window": 8, "head_dim": 8}
    del inside["tie_word_embeddings"]
    shape = written(tmp_path, {"model_type": "gemma3", "vision_config": {}, "text_config": inside})
    assert shape.tied and shape.windowed == 0 and shape.hidden == 32


def test_what_gemma_3s_config_leaves_out_is_transformers_default(tmp_path):
    inside = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {"model_type": "gemma3", "vision_config": {}, "text_config": {"model_type": "gemma3_text", **inside}}
    shape = written(tmp_path, config)  # as published for 4B
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3_text", **inside))
    assert shape.parameters == pytest.approx(model.num_parameters(), rel=1e-4)  # norms differ from Llama's
    assert shape.positions == model.config.max_position_embeddings and shape.kv_heads == 4


@pytest.mark.parametrize("config", [{"vision_config": {}}, {"audio_config": {"a": 1}}])
def test_a_model_that_takes_more_than_text_is_refused_with_the_reason(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", **config}))
    with pytest.raises(ConfigError, match="art trains text models only"):
        find_shape(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-VL-7B-Instruct", "meta-llama/Llama-3.2-11B-Vision-Instruct", "Qwen/Qwen2.5-Omni-7B"]
)
def test_a_name_that_says_more_than_text_is_refused_with_the_reason(name):
    with pytest.raises(ConfigError, match="art trains text models only"):
        find_shape(name)
