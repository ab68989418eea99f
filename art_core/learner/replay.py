"""Stored weights and token trees of stored calls -> the logprobs that these weights assign."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from art_core.errors import StoreError
from art_core.learner import checkpoint
from art_core.learner.pretrained import load_adapter, load_causal_lm
from art_core.learner.sizes import SMALL_MODEL
from art_core.learner.tree_forward import tree_logprobs
from art_core.runtime.cpu import onednn_products, torch_threads
from art_core.types import TokenTree

if TYPE_CHECKING:
    from peft import PeftModel


def load_weights(start: str | Path, folder: Path | None) -> PreTrainedModel | PeftModel:
    """Load the weights of checkpoint ``folder`` (a whole model, or an adapter on the start weights), or the start weights if
    it is None; float32, on the GPU if there is one. Raises StoreError if a file is damaged or can't be loaded."""
    adapter = folder is not None and not (folder / "config.json").is_file()
    if folder is not None:
        checkpoint.read_state(folder)
    source = start if folder is None or adapter else folder
    try:
        model = load_causal_lm(source)
        if adapter:
            model = load_adapter(model, folder / checkpoint.ADAPTER)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        what = f"{source}, with the adapter in {folder}," if adapter else source
        raise StoreError(f"{what} cannot be loaded: {error}; put the model back in its place") from error
    return model.requires_grad_(False).eval().to("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def replay(model: torch.nn.Module, tree: TokenTree) -> np.ndarray:
    """Return the logprob of every target: (num_targets,) float32."""
    small = sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL
    with torch_threads(1) if small else onednn_products():
        return tree_logprobs(model, tree).float().cpu().numpy()
