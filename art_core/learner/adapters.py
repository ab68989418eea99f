"""A model's LoRA adapter and the merged weights. Imports PEFT, so this module is imported only if there is an adapter."""

from __future__ import annotations

from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor
from transformers import PreTrainedModel

from art_core.learner.pretrained import quiet_adapters

MAMBA = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
"""Model types whose kernels read the weights of ``out_proj`` and ``conv1d`` directly, so PEFT refuses to adapt these."""


def add_adapter(model: PreTrainedModel, rank: int) -> PeftModel:
    """Add a new adapter to ``model``."""
    excluded = ["out_proj", "conv1d"] if model.config.model_type in MAMBA else None
    lora = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", exclude_modules=excluded, task_type="CAUSAL_LM"
    )
    with quiet_adapters():
        return get_peft_model(model, lora)


class AdaptedWeight(NamedTuple):
    """A weight of the base model with a LoRA update."""

    layer: LoraLayer

    @property
    def shape(self) -> torch.Size:
        """The base weight's shape; that of its 4-bit storage is different."""
        weight = self.layer.get_param() if isinstance(self.layer, ParamWrapper) else self.layer.get_base_layer().weight
        return getattr(weight, "quant_state", weight).shape

    def merged(self) -> Tensor:
        """Return the base weight plus the adapter's update."""
        if isinstance(self.layer, ParamWrapper):
            return self.layer.get_param() + self.layer.get_delta_weight("default")
        return dequantize_module_weight(self.layer.get_base_layer()) + self.layer.get_delta_weight("default")


def adapted_weights(model: PreTrainedModel) -> dict[str, AdaptedWeight]:
    """Return the adapted weights by their name in the base model."""
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):  # one per parameter of an experts block, nested
            weights[f"{name.replace('.base_layer', '')}.{module.parameter_name}"] = AdaptedWeight(module)
        elif isinstance(module, LoraLayer):
            weights[f"{name}.weight"] = AdaptedWeight(module)
    return weights
