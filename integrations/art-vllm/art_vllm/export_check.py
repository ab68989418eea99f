"""Whether an export computes what was trained: the logprobs of one text under both. Knows nothing about files."""

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
"""Largest difference of a logprob, in nats. What weights rounded to 16 bits give is another number, not another model."""


@dataclass(frozen=True)
class Check:
    """What was found when the export was loaded back. All in nats, computed in float32."""

    text: str
    """Where the tokens come from."""
    tokens: int
    """Compared."""
    largest: float
    """Difference of a token's logprob between the export and what was trained."""
    mean: float
    """Of these differences."""
    tolerance: float
    """Of ``largest``."""
    moved: float | None
    """Mean difference between what was trained and the start weights; None where all weights were trained."""

    @property
    def lost(self) -> bool:
        """Whether the number format took as much away as training put there."""
        return self.moved is not None and 0 < self.moved <= self.mean


class Comparison:
    """The logprobs of a text under what was trained, waiting for those of the export."""

    def __init__(self, model: PreTrainedModel | PeftModel, source: Source) -> None:
        self.text, self._tree = _text(source)
        self._trained = replay(model, self._tree)
        self.moved: float | None = None
        if isinstance(model, PeftModel):
            with model.disable_adapter():
                self.moved = float(np.abs(self._trained - replay(model, self._tree)).mean())

    def with_export(self, model: PreTrainedModel | PeftModel, dtype: torch.dtype) -> Check:
        """Return the differences; ArtError where one is larger than ``dtype`` explains."""
        differences = np.abs(replay(model, self._tree) - self._trained)
        largest, tolerance = float(differences.max()), TOLERANCE[dtype]
        if not largest <= tolerance:  # also where it is not a number
            raise ArtError(
                f"the export does not compute what was trained: a logprob differs by {largest:.3g} nats on {self.text}, and "
                f"{dtype} explains {tolerance:g}; nothing was written; --dtype float32 is the most exact, --no-check exports "
                "all the same"
            )
        return Check(self.text, len(differences), largest, float(differences.mean()), tolerance, self.moved)


def _text(source: Source) -> tuple[str, TokenTree]:
    """Return what the text is and its tree: every token but the first counts, those of a prompt too."""
    if source.call is not None:
        ids = [*source.call.prompt_ids, *source.call.sampled_ids]
        what = f"a stored call of version {source.call.policy_version}"
    else:
        ids = load_tokenizer(source.start if source.adapter else source.checkpoint)(TEXT)["input_ids"]
        what = "a fixed text"
    call = Call(prompt_ids=tuple(ids[:1]), sampled_ids=tuple(ids[1:]), logprobs=(0.0,) * (len(ids) - 1))
    return what, build_tree([Trajectory(task=None, calls=(call,))])
