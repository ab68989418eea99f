"""Runs inside vLLM's worker, in vLLM's own environment, on CPUs: two repairs that right weights need. Knows nothing of art.

Loaded by ``--worker-extension-cls art_cpu_worker.Repaired``; both were found in vLLM 0.32.0 and its GPU code needs neither.
"""

from __future__ import annotations

from typing import Any

from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

add_shrink = PunicaWrapperCPU.add_shrink


def add_shrink_without_base(self: PunicaWrapperCPU, y: Any, *args: Any, **kwargs: Any) -> None:
    """Keep tokens of the base model out of the adapters: their index, -1, would take that of the last slot."""
    add_shrink(self, y, *args, **kwargs)
    if not self.no_lora:
        for rows in y:
            rows[self.token_lora_indices < 0] = 0


PunicaWrapperCPU.add_shrink = add_shrink_without_base


class Repaired:
    """What the worker can be asked for besides."""

    def reload_all_weights(self, weights_path: str) -> None:
        """Load a model folder's weights, into the output head too: where it is tied to the embeddings it has its weights
        packed for the CPU, which ``reload_weights`` leaves as they were."""
        self.reload_weights(weights_path=weights_path)
        for module in self.model_runner.get_model().modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedEmbeddingMethod):
                method.process_weights_after_loading(module)
