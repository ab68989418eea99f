"""Two fixes for vLLM's CPU worker, without which it serves wrong weights. Runs in vLLM's environment, so it can't import art.

Loaded by ``--worker-extension-cls art_cpu_worker.Repaired``. Both bugs are in vLLM 0.32.0; its GPU code has neither.
"""

from __future__ import annotations

from typing import Any

from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

add_shrink = PunicaWrapperCPU.add_shrink


def add_shrink_without_base(self: PunicaWrapperCPU, y: Any, *args: Any, **kwargs: Any) -> None:
    """Apply no adapter to tokens of the base model: their index, -1, would select the last slot."""
    add_shrink(self, y, *args, **kwargs)
    if not self.no_lora:
        for rows in y:
            rows[self.token_lora_indices < 0] = 0


PunicaWrapperCPU.add_shrink = add_shrink_without_base


class Repaired:
    """Methods that are added to the worker."""

    def reload_all_weights(self, weights_path: str) -> None:
        """Load a model folder's weights, including the output head.

        A head that is tied to the embeddings has its own copy, packed for the CPU, which ``reload_weights`` doesn't update.
        """
        self.reload_weights(weights_path=weights_path)
        for module in self.model_runner.get_model().modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(module)
