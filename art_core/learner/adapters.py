"""A model's LoRA adapter, and what the model's weights are with it. Imports PEFT, so it is imported only where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor
from transformers import PreTrainedModel

from art_core.learner.pretrained import quiet_adapters

MAMBA = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
"""Model types whose kernels read the weights of these modules past PEFT's adapters, which it refuses there."""


def add_adapter(model: PreTrainedModel, rank: int) -> PeftModel:
    """Put a new adapter on ``model``."""
    excluded = ["out_proj", "conv1d"] if model.config.model_type in MAMBA else None
    lora = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", exclude_modules=excluded, task_type="CAUSAL_LM"
    )
    with quiet_adapters():
        return get_peft_model(model, lora)


def adapted(model: PreTrainedModel) -> Iterator[tuple[str, LoraLayer]]:
    """Yield the names that adapted parameters have in the plain model, each with the layer that adapts it."""
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):  # one for each parameter of a block of experts, around each other
            yield f"{name.replace('.base_layer', '')}.{module.parameter_name}", module
        elif isinstance(module, LoraLayer):
            yield f"{name}.weight", module


def plain_shape(module: LoraLayer) -> torch.Size:
    """Return the shape of the plain model's weight."""
    weight = module.get_param() if isinstance(module, ParamWrapper) else module.get_base_layer().weight
    return getattr(weight, "quant_state", weight).shape  # what is packed in 4 bits has another shape itself


def merged_weight(module: LoraLayer) -> Tensor:
    """Return the plain model's weight with the adapter's part."""
    plain = (
        module.get_param() if isinstance(module, ParamWrapper) else dequantize_module_weight(module.get_base_layer())
    )
    return plain + module.get_delta_weight("default")
