"""Gradient steps with Unsloth: the torch learner's, on a model that Unsloth loads and patches. LoRA only.

Imports Unsloth, which changes transformers, peft and trl for the whole process: docs/unsloth.md says what.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel

from art_core import unsloth
from art_core.config import LORA_RANK, TrainConfig
from art_core.errors import ConfigError
from art_core.learner.checkpoint import no_progress_bars
from art_core.learner.torch_learner import TorchLearner
from art_core.learner.tree_forward import tree_logprobs
from art_core.token_tree import build_tree
from art_core.types import Call, Loss, Trajectory

logger = logging.getLogger("art_core.learner")


class UnslothLearner(TorchLearner):
    """Trains a LoRA adapter on token trees with Unsloth's kernels; everything else is as in ``TorchLearner``.

    On a GPU weights are bfloat16 where it can, or 4-bit, and activations are recomputed as Unsloth does it; without one they
    are float32 and Unsloth adds no kernels. Raises ConfigError where Unsloth cannot be used, and where ``config.lora_rank``
    is 0.
    """

    def __init__(self, model_folder: str | Path, config: TrainConfig, loss: Loss) -> None:
        if config.lora_rank == 0:
            raise ConfigError("learner='unsloth' trains LoRA adapters; give lora_rank=16, or learner='torch'")
        self._unsloth = unsloth.load()
        super().__init__(model_folder, config, loss)
        self.model.train(unsloth.has_gpu())
        if not follows_trees(self.model):
            # The mark that tree_logprobs reads.
            self.model.get_base_model().one_row_per_path = True

    def _load(self) -> PreTrainedModel:
        with unsloth.quiet(), no_progress_bars():
            model, _ = self._unsloth.FastLanguageModel.from_pretrained(
                self.model_folder,
                max_seq_length=None,
                dtype=None if unsloth.has_gpu() else torch.float32,
                load_in_4bit=self._in_4bit(),
                use_gradient_checkpointing=_recompute(),
            )
        return model

    def _in_4bit(self) -> bool:
        wanted = self.config.load_in_4bit
        if not unsloth.has_gpu():
            if wanted:
                raise ConfigError("load_in_4bit=True needs a GPU and torch finds none; leave it out")
            return False
        if wanted is not None:
            return wanted
        memory = torch.cuda.get_device_properties(0).total_memory
        return 2 * unsloth.parameters(self.model_folder) > memory / 2

    def _rank(self, size: int) -> int:
        return self.config.lora_rank or LORA_RANK

    def _add_adapter(self, model: PreTrainedModel, rank: int) -> PeftModel:
        with unsloth.quiet():
            adapted = self._unsloth.FastLanguageModel.get_peft_model(
                model,
                r=rank,
                lora_alpha=2 * rank,
                lora_dropout=0.0,
                target_modules="all-linear",
                use_gradient_checkpointing=_recompute(),
                random_state=self.config.seed,
            )
        if unsloth.has_gpu():
            _keep_masks(adapted)
        return adapted


def _recompute() -> str | bool:
    """Return Unsloth's way to recompute activations; without a GPU it would only cost time."""
    return "unsloth" if unsloth.has_gpu() else False


def _keep_masks(model: PeftModel) -> None:
    """Let Unsloth's forward keep the mask that it is given, and rows of any length, in training mode; no dropout.

    Training mode is what its recomputation needs. Its own trainers set the same two marks for their packed rows.
    """
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


@torch.no_grad()
def follows_trees(model: PeftModel) -> bool:
    """Return whether one pass over a small tree gives the logprobs that its calls have on their own; said where not."""
    vocabulary = model.config.get_text_config().vocab_size
    prompt, *answers = (tuple((step * i + 3) % vocabulary for i in range(8)) for step in (5, 7, 11))
    calls = [Call(prompt_ids=prompt, sampled_ids=answer, logprobs=(0.0,) * 8) for answer in answers]
    together = tree_logprobs(model, build_tree([Trajectory(task=None, calls=(call,)) for call in calls]))
    alone = torch.cat([_own_logprobs(model, call) for call in calls])
    difference = (together - alone).abs().max().item()
    if difference <= (1e-3 if model.dtype == torch.float32 else 0.1):
        return True
    logger.warning(
        "Unsloth's attention for %s does not follow a token tree (logprobs differ by %.3g); every root-to-leaf path is "
        "computed on its own, with its kernels",
        type(model.get_base_model()).__name__,
        difference,
    )
    return False


def _own_logprobs(model: PeftModel, call: Call) -> Tensor:
    ids = torch.tensor([[*call.prompt_ids, *call.sampled_ids]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(call.prompt_ids) - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids[0, len(call.prompt_ids) :, None])[:, 0]
