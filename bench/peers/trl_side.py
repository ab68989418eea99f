"""TRL's own loss on the group's histories: ``GRPOTrainer.compute_loss``, unmodified."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from bench.peers.batch import Batch
from bench.plain import micro_batches, padded


def trl_side(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, batch: Batch, size: int
) -> tuple[Callable[[torch.nn.Module], None], PreTrainedModel]:
    """Return the pass over the batch in micro-batches of ``size`` rows, and the model to pass to it.

    The model is a copy, because TRL replaces ``forward``. Raises ImportError without TRL.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = copy.deepcopy(model)
    with tempfile.TemporaryDirectory(prefix="art-bench-trl") as folder:
        arguments = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, report_to=[], per_device_train_batch_size=size, num_generations=2,
            max_completion_length=64, gradient_checkpointing=False, save_strategy="no", disable_tqdm=True,
            per_device_eval_batch_size=2, gradient_accumulation_steps=2,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["a"]}),
            processing_class=tokenizer,
        )
    # One accumulation window is the whole batch, so that TRL divides by num_items_in_batch only.
    trainer.current_gradient_accumulation_steps = arguments.steps_per_generation = -(-len(batch.histories) // size)
    prompt = min(int(np.flatnonzero(row.trained)[0]) for row in batch.histories)

    def step(model: torch.nn.Module) -> None:
        for rows in micro_batches(batch.histories, size):
            ids = padded([row.ids for row in rows], model.device)
            mask = padded([[1] * len(row.ids) for row in rows], model.device)
            trained = padded([row.trained for row in rows], model.device)
            inputs = {
                "prompt_ids": ids[:, :prompt],
                "prompt_mask": mask[:, :prompt],
                "completion_ids": ids[:, prompt:],
                "completion_mask": mask[:, prompt:],
                "tool_mask": trained[:, prompt:],
                "advantages": torch.tensor([row.advantage for row in rows], dtype=model.dtype),
                "num_items_in_batch": torch.tensor(float(batch.trained)),
            }
            trainer.compute_loss(model, inputs).backward()

    return step, model
