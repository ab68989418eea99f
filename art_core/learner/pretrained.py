"""A model folder or hub name -> its config, model and tokenizer; models that can't be trained are refused.

No code from a model's folder is ever run, only transformers' own, and weights are read from safetensors, never unpickled.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from art_core.config import model_folder
from art_core.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftModel

SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers doesn't know -> the name under which it knows the same architecture."""
TEXT_MODELS = {
    "qwen2_vl": "Qwen/Qwen2.5-7B-Instruct", "qwen2_5_vl": "Qwen/Qwen2.5-7B-Instruct", "qwen2_5_omni": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2_audio": "Qwen/Qwen2.5-7B-Instruct", "qwen3_vl": "Qwen/Qwen3-8B", "qwen3_vl_moe": "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "qwen3_omni_moe": "Qwen/Qwen3-30B-A3B-Instruct-2507", "kimi_k25": "moonshotai/Kimi-K2-Instruct",
}  # fmt: skip
"""Multimodal model types -> a text model of the same family."""
NOT_LOADED = "cannot be loaded as a causal language model"
MODEL_ADVICE = (
    "pass a folder written by save_pretrained, a hub name that exists (gated models need a login), or without a network "
    "model='tiny', which ships with art (ART_MODEL=tiny for a classic Agent)"
)


def load_config(model: str | Path) -> PreTrainedConfig:
    """Return the config of a causal LM. Raises ConfigError if there is none, or if the model is of another kind."""
    with _loading(f"{model} {NOT_LOADED}"):
        fields, _ = PreTrainedConfig.get_config_dict(model)
        kind = fields.get("model_type")
        if kind in SAME_AS:
            fields = {name: value for name, value in fields.items() if name not in ("model_type", "auto_map")}
            config = CONFIG_MAPPING[SAME_AS[kind]].from_dict(fields)
            config.name_or_path = str(model)
        else:
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and set(config.sub_configs) - {"text_config"}:
        text_model = TEXT_MODELS.get(config.model_type)
        raise ConfigError(
            f"{model} is multimodal ({config.model_type}) and cannot be trained: art trains on the tokens of calls, and images "
            "and sound aren't tokens, so they would be missing from the training data; pass a text model of the same family"
            f"{f', such as {text_model}' if text_model else ''} (docs/models.md)"
        )
    return config


def load_causal_lm(model: str | Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a causal LM on the CPU. Raises ConfigError if ``model`` has none, or one that can't be trained."""
    config = load_config(model)
    with _loading(f"{model} {NOT_LOADED}"), no_progress_bars():
        loaded = AutoModelForCausalLM.from_pretrained(
            model, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True
        )
    try:
        loaded.generation_config.validate(strict=True)
    except ValueError:  # sampling values without do_sample, such as Vicuna's, with which it couldn't be saved
        loaded.generation_config.do_sample = True
    return loaded


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer. Raises ConfigError if there is none, or if it is code in the model's folder."""
    with _loading(f"no tokenizer could be loaded from {model}", "save one there"):
        code = (get_tokenizer_config(model).get("auto_map") or {}).get("AutoTokenizer")
        if code and cached_file(model, "tokenizer.json", _raise_exceptions_for_missing_entries=False) is None:
            raise ConfigError(
                f"the tokenizer of {model} is code of its own ({code}), which is not run here, and transformers would split "
                "texts differently; write a tokenizer.json for it, as docs/models.md says under Kimi"
            )
        return AutoTokenizer.from_pretrained(model, config=load_config(model), trust_remote_code=False)


def load_teacher(teacher: str, student: str, dtype: torch.dtype) -> PreTrainedModel:
    """Load a frozen model on the CPU that scores the student's tokens. Raises ConfigError if its ids stand for other tokens."""
    folder = model_folder(teacher)
    its, own = (load_tokenizer(model).get_vocab() for model in (folder, student))
    if others := sum(its.get(token) != number for token, number in own.items()):
        raise ConfigError(
            f"the teacher {teacher} has other ids for {others} of the {len(own)} tokens of {student}, so it would score other "
            "texts than the student's; choose a teacher of the same family"
        )
    return load_causal_lm(folder, dtype).requires_grad_(False).eval()


def load_generation_config(model: str | Path) -> GenerationConfig:
    """Return the model's generation config, or else one made from its model config."""
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        return GenerationConfig.from_model_config(load_config(model))


def positions(config: PreTrainedConfig) -> int | None:
    """Return the maximum number of tokens in a context, or None if the config doesn't say.

    That is ``max_position_embeddings``, and with YaRN at least the original length times its factor: Qwen's instructions for
    long contexts add YaRN to the config and leave the other number unchanged. Peng et al., arXiv 2309.00071.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    for rope in rope_parameters(config):
        if rope.get("rope_type") == "yarn" and limit:
            limit = max(limit, int(rope.get("original_max_position_embeddings", limit) * rope.get("factor", 1.0)))
    return limit


def rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of every rotary embedding; some models have one per layer type."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def fixed_rope_positions(config: PreTrainedConfig) -> int | None:
    """Return up to which position rotary frequencies are fixed; beyond, they depend on the batch's longest row. None: always."""
    ropes = rope_parameters(config)
    limits = [rope["original_max_position_embeddings"] for rope in ropes if rope.get("rope_type") == "longrope"]
    limits += [config.get_text_config().max_position_embeddings for rope in ropes if rope.get("rope_type") == "dynamic"]
    return min(limits, default=None)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Hide transformers' progress bars inside the block."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


@contextmanager
def quiet_adapters() -> Iterator[None]:
    """Silence PEFT's false alarms inside the block."""
    with warnings.catch_warnings():
        # PEFT names experts, which are parameters, by patterns and looks for modules with these names; it corrects
        # fan_in_fan_out itself (GPT-2); and it still uses a name that transformers 5.24 deprecated.
        alarms = "The following .*_pattern keys did not match|fan_in_fan_out is set|`is_gradient_checkpointing`"
        warnings.filterwarnings("ignore", alarms)
        yield


def cache_argument(model: torch.nn.Module) -> str | None:
    """Return the name under which ``model`` takes a cache, which transformers 5.24 changed; None if it takes none."""
    return next((name for name in ("cache", "past_key_values") if name in signature(model.forward).parameters), None)


def has_adapter(model: torch.nn.Module) -> TypeGuard[PeftModel]:
    """Whether ``model`` is a PEFT model; doesn't import PEFT."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def load_adapter(model: PreTrainedModel, folder: str | Path) -> PeftModel:
    """Add the PEFT adapter in ``folder`` to ``model``; ConfigError if PEFT is missing or would have to unpickle the weights."""
    if not Path(folder, "adapter_model.safetensors").is_file():
        raise ConfigError(
            f"{folder} has no adapter_model.safetensors, and nothing is unpickled here; save the adapter with save_pretrained"
        )
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ConfigError(f"{folder} is an adapter, but peft isn't installed; run: pip install peft") from error
    with quiet_adapters():
        return PeftModel.from_pretrained(model, str(folder))


@contextmanager
def _loading(failure: str, advice: str = MODEL_ADVICE) -> Iterator[None]:
    """Turn transformers' errors inside the block into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        # A missing file needs no second traceback: the message names it.
        raise ConfigError(f"{failure}: {reason}; {advice}") from (None if isinstance(error, OSError) else error)
