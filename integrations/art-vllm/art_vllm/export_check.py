"""Checks that an export computes what was trained, by the logprobs of one text under both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from peft import PeftModel
from transformers import PreTrainedModel

from art_core.errors import ArtError
from art_core.learner.pretrained import load_tokenizer
from art_core.learner.replay import replay
from art_core.token_tree import build_tree
from art_core.types import Call, TokenTree, Trajectory
from art_vllm.export_source import Source

TEXT = "The quick brown fox jumps over the lazy dog. Every export is loaded back and must give the same logprobs."
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.5, torch.float16: 0.5}
"""Largest accepted difference of a logprob, in nats. Rounding to 16 bits changes the numbers, but not the model."""


@dataclass(frozen=True)
class Check:
    """The result of comparing an export with the trained weights, in nats, computed in float32."""

    text: str
    """Source of the tokens."""
    tokens: int
    """Number of compared tokens."""
    largest: float
    """Largest difference of a token's logprob between the export and the trained weights."""
    mean: float
    """Mean difference."""
    tolerance: float
    """Accepted value of ``largest``."""
    moved: float | None
    """Mean difference between the trained and the start weights; None if all weights were trained."""

    @property
    def lost(self) -> bool:
        """Whether rounding removed at least as much as training added."""
        return self.moved is not None and 0 < self.moved <= self.mean


class Comparison:
    """Compares the logprobs of a text under the trained weights with those under the export."""

    def __init__(self, model: PreTrainedModel | PeftModel, source: Source) -> None:
        self.text, self._tree = _text(source)
        self._trained = replay(model, self._tree)
        self.moved: float | None = None
        if isinstance(model, PeftModel):
            with model.disable_adapter():
                self.moved = float(np.abs(self._trained - replay(model, self._tree)).mean())

    def with_export(self, model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> Check:
        """Return the differences. Raises ArtError if one is larger than rounding to ``dtype`` explains."""
        differences = np.abs(replay(model, self._tree) - self._trained)
        largest, tolerance = float(differences.max()), TOLERANCE[dtype]
        if not largest <= tolerance:  # true for NaN too
            raise ArtError(
                f"the export doesn't compute what was trained: a logprob differs by {largest:.3g} nats on {self.text}, but "
                f"rounding to {dtype} explains at most {tolerance:g}; nothing was written; try --dtype float32, the most exact, "
                "or skip the check with --no-check"
            )
        return Check(self.text, len(differences), largest, float(differences.mean()), tolerance, self.moved)


def _text(source: Source) -> tuple[str, TokenTree]:
    """Return the text's description and its tree, in which all tokens except the first are targets, prompts included."""
    if source.call is not None:
        ids = [*source.call.prompt_ids, *source.call.sampled_ids]
        description = f"a stored call of version {source.call.policy_version}"
    else:
        ids = load_tokenizer(source.start if source.adapter else source.checkpoint)(TEXT)["input_ids"]
        description = "a fixed text"
    call = Call(prompt_ids=tuple(ids[:1]), sampled_ids=tuple(ids[1:]), logprobs=(0.0,) * (len(ids) - 1))
    return description, build_tree([Trajectory(task=None, calls=(call,))])
