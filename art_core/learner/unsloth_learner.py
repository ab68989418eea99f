"""The torch learner's gradient steps on a model that Unsloth loads and patches. LoRA only.

Unsloth patches transformers, peft and trl for the whole process: see docs/unsloth.md.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from art_core.config import TrainConfig
from art_core.errors import ConfigError
from art_core.learner import unsloth
from art_core.learner.pretrained import no_progress_bars
from art_core.learner.sizes import LORA_RANK
from art_core.learner.torch_learner import TorchLearner
from art_core.learner.tree_attention import ATTENTION
from art_core.learner.tree_forward import way_of
from art_core.types import Loss

logger = logging.getLogger("art_core.learner")


class UnslothLearner(TorchLearner):
    """Trains a LoRA adapter on token trees with Unsloth's kernels; otherwise like ``TorchLearner``.

    On a GPU the weights are bfloat16 if it supports that, or 4-bit, and Unsloth recomputes activations. Without a GPU they
    are float32, without kernels, and nothing is recomputed. Raises ConfigError if Unsloth can't be used or
    ``config.lora_rank`` is 0.
    """

    def __init__(self, model_folder: str | Path, config: TrainConfig, loss: Loss) -> None:
        if config.lora_rank == 0:
            raise ConfigError("learner='unsloth' trains LoRA adapters only; set lora_rank=16, or use learner='torch'")
        if config.teacher:
            raise ConfigError(f"learner='unsloth' takes no teacher=: {unsloth.NO_TEACHER}; use learner='torch'")
        self._unsloth = unsloth.load()
        super().__init__(model_folder, config, loss)
        self.model.train(unsloth.has_gpu())
        if way_of(self.model).backend == "paths":
            logger.warning("root-to-leaf paths are computed one by one, with Unsloth's kernels if it has any for them")

    def _load(self) -> PreTrainedModel:
        with unsloth.quiet(), no_progress_bars():
            model, _ = self._unsloth.FastLanguageModel.from_pretrained(
                self.model_folder, max_seq_length=None, dtype=None if unsloth.has_gpu() else torch.float32,
                load_in_4bit=self._in_4bit(), use_gradient_checkpointing=unsloth.has_gpu() and "unsloth",
            )  # fmt: skip
        return model

    def _in_4bit(self) -> bool:
        wanted, gpu = self.config.load_in_4bit, unsloth.has_gpu()
        if wanted and not gpu:
            raise ConfigError("load_in_4bit=True needs a GPU and torch finds none; leave it out")
        if wanted is not None or not gpu:
            return bool(wanted)
        memory = torch.cuda.get_device_properties(0).total_memory
        return 2 * unsloth.parameters(self.model_folder) > memory / 2

    def _rank(self, size: int) -> int:
        return self.config.lora_rank or LORA_RANK

    def _add_adapter(self, model: PreTrainedModel, rank: int) -> PeftModel:
        with unsloth.quiet():
            adapted = self._unsloth.FastLanguageModel.get_peft_model(
                model, r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear",
                use_gradient_checkpointing=unsloth.has_gpu() and "unsloth", random_state=self.config.seed,
            )  # fmt: skip
        if unsloth.has_gpu():
            _keep_masks(adapted)
            _use_registered_attention()
        return adapted


def _keep_masks(model: PeftModel) -> None:
    """Make Unsloth's forward keep our mask and accept rows of any length in training mode, which its recomputation needs,
    without dropout. Its own trainers set the same two flags for packed rows."""
    base = model.get_base_model()
    base.set_attn_implementation("sdpa")
    decoder = base.get_decoder()
    decoder._unsloth_keep_padding_mask = True
    decoder._unsloth_allow_packed_overlength = True
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0


def _use_registered_attention() -> None:
    """Let transformers' registry compute attention with a tree mask (integers or blocks), as Unsloth's forward for GPUs
    calls its own dispatcher instead. All other masks still go there."""
    for module in [module for name, module in sys.modules.items() if name.startswith("unsloth.models.")]:
        own = vars(module).get("run_attention")
        if own is not None and not hasattr(own, "unregistered"):
            module.run_attention = _dispatch(own)


def _dispatch(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run_attention(*, config: Any, context: Any, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        mask = context.attention_mask
        if mask is None or (isinstance(mask, Tensor) and mask.dtype != torch.int64):
            return own(config=config, context=context, Q=Q, K=K, V=V)
        layer = SimpleNamespace(num_key_value_groups=config.n_groups, training=context.training, is_causal=True)
        attend = ALL_ATTENTION_FUNCTIONS["flex_attention" if isinstance(mask, BlockMask) else ATTENTION]
        return attend(layer, Q, K, V, mask, scaling=context.head_dim**-0.5, dropout=0.0)[0]

    run_attention.unregistered = own
    return run_attention
