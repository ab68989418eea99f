"""A model folder or hub name -> its config, model and tokenizer, by transformers; what cannot be trained is refused.

Knows nothing about serving or training. No code from a model's folder is ever run: models are computed by
transformers' own, and weights are read from safetensors only, never unpickled.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

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

from art_core.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftModel

SAME_AS = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers does not know -> the architecture that they are, by another name."""
TEXT_MODELS = {
    "qwen2_vl": "Qwen/Qwen2.5-7B-Instruct", "qwen2_5_vl": "Qwen/Qwen2.5-7B-Instruct", "qwen2_5_omni": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2_audio": "Qwen/Qwen2.5-7B-Instruct", "qwen3_vl": "Qwen/Qwen3-8B", "qwen3_vl_moe": "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "qwen3_omni_moe": "Qwen/Qwen3-30B-A3B-Instruct-2507", "kimi_k25": "moonshotai/Kimi-K2-Instruct",
}  # fmt: skip
"""Multimodal model types -> a text model of the same family."""


def load_config(model: str | Path) -> PreTrainedConfig:
    """Return the config of a causal LM. Raises ConfigError where there is none, or that of another kind of model."""
    try:
        fields, _ = PreTrainedConfig.get_config_dict(model)
        kind = fields.get("model_type")
        if kind in SAME_AS:
            known = {name: value for name, value in fields.items() if name not in ("model_type", "auto_map")}
            config = CONFIG_MAPPING[SAME_AS[kind]].from_dict(known)
            config.name_or_path = str(model)
        else:
            config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise _unloadable(model, error) from _cause(error)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and set(config.sub_configs) - {"text_config"}:
        text_model = TEXT_MODELS.get(config.model_type)
        raise ConfigError(
            f"{model} is multimodal ({config.model_type}) and cannot be trained: art trains on the tokens of calls, and images "
            "and sound are none, so what the model was shown would be missing from what it learns; give a text model of the "
            f"same family{f', such as {text_model}' if text_model else ''} (docs/models.md)"
        )
    return config


def load_causal_lm(model: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Load a causal LM on the CPU. Raises ConfigError where ``model`` has none or one that cannot be trained."""
    config = load_config(model)
    try:
        with no_progress_bars():
            return AutoModelForCausalLM.from_pretrained(
                model, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True
            )
    except (OSError, ValueError, KeyError) as error:
        raise _unloadable(model, error) from _cause(error)


def load_tokenizer(model: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside the model. Raises ConfigError where there is none, or one that is code of its own."""
    try:
        code = (get_tokenizer_config(model).get("auto_map") or {}).get("AutoTokenizer")
        if code and cached_file(model, "tokenizer.json", _raise_exceptions_for_missing_entries=False) is None:
            raise ConfigError(
                f"the tokenizer of {model} is code of its own ({code}), which is not run here, and transformers would cut texts "
                "in another way; write a tokenizer.json for it, as docs/models.md says under Kimi"
            )
        return AutoTokenizer.from_pretrained(model, config=load_config(model), trust_remote_code=False)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"no tokenizer could be loaded from {model}: {_said(error)}; save it beside the model"
        ) from _cause(error)


def load_generation_config(model: str | Path) -> GenerationConfig:
    """Return how the model's answers end, from its generation config or else its own."""
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:
        return GenerationConfig.from_model_config(load_config(model))


def positions(config: PreTrainedConfig) -> int | None:
    """Return the tokens that a context may have; None where the config does not say.

    ``max_position_embeddings``; where YaRN is set, at least the original length times its factor: Qwen's instructions for
    long contexts add YaRN to the config and leave the other number as it is. Peng et al., arXiv 2309.00071.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    for kind in kinds:
        if kind.get("rope_type") == "yarn" and limit:
            stretched = int(kind.get("original_max_position_embeddings", limit) * kind.get("factor", 1.0))
            limit = max(limit, stretched)
    return limit


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing a bar for every load and save inside the block."""
    drawn = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            transformers_logging.enable_progress_bar()


@contextmanager
def quiet_adapters() -> Iterator[None]:
    """Keep PEFT from warning inside the block of what is as it should be."""
    with warnings.catch_warnings():
        # It names experts by patterns, and then looks for modules of these names; they are parameters.
        warnings.filterwarnings("ignore", "The following .*_pattern keys did not match", RuntimeWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False", UserWarning)  # and then is not: GPT-2
        yield


def has_adapter(model: torch.nn.Module) -> TypeGuard[PeftModel]:
    """Whether it is PEFT's model of another one; PEFT is not imported for that."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def load_adapter(model: PreTrainedModel, folder: str | Path) -> PeftModel:
    """Put the PEFT adapter in ``folder`` on ``model``. Raises ConfigError where PEFT is not installed, or where the adapter's
    weights are not in safetensors: PEFT would unpickle them."""
    if not Path(folder, "adapter_model.safetensors").is_file():
        raise ConfigError(
            f"{folder} has no adapter_model.safetensors, and nothing is unpickled here; save the adapter with save_pretrained"
        )
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ConfigError(f"{folder} is an adapter, and peft is not installed; run: pip install peft") from error
    with quiet_adapters():
        return PeftModel.from_pretrained(model, str(folder))


def _unloadable(model: str | Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{model} cannot be loaded as a causal language model: {_said(error)}; give a folder that save_pretrained wrote, a hub "
        "name that exists (gated models need a login), or without a network model='tiny', which ships with art (ART_MODEL=tiny "
        "for a classic Agent)"
    )


def _said(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _cause(error: Exception) -> Exception | None:
    """Return what a traceback is to show beside ours: nothing of a file that is not there, which our message says."""
    return None if isinstance(error, OSError) else error
