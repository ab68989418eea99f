"""The price of a run on a service that bills tokens, such as Tinker."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from art_core.errors import ConfigError
from art_vllm.workload import Workload

KINDS = ("prompt", "sampled", "trained")
NOT_COUNTED = "not included: evaluations, what the service's cache saves, storage, the judge"


@dataclass(frozen=True)
class Price:
    """What a step's tokens cost."""

    source: str
    """Where the counts come from."""
    tokens: dict[str, float]
    """Of one step, by kind: those of all prompts and of the pass that only reads logprobs, the sampled ones, and those of the
    rows that gradients are computed for."""
    dollars: dict[str, float]
    """Of one step, by kind."""
    steps: int

    @property
    def step(self) -> float:
        """Dollars of one step."""
        return sum(self.dollars.values())

    def as_json(self) -> dict[str, Any]:
        """Return all figures for ``--json``."""
        return {
            "source": self.source,
            "tokens": self.tokens,
            "dollars": self.dollars,
            "dollars_per_step": self.step,
            "steps": self.steps,
            "dollars_total": self.step * self.steps,
        }

    def report(self, model: str) -> str:
        """Return what a person reads."""
        lines = [f"{model}, one step ({self.source})"]
        lines += [f"  {kind:8} {self.tokens[kind]:12,.0f} tokens  ${self.dollars[kind]:.4f}" for kind in KINDS]
        lines += [
            f"  a step costs ${self.step:.4f}, {self.steps} steps cost ${self.step * self.steps:.2f}",
            NOT_COUNTED,
        ]
        return "\n".join(lines)


def price(workload: Workload, dollars_per_million: str, steps: int) -> Price:
    """Return the price of ``steps`` steps; ``dollars_per_million``: "PROMPT,SAMPLED,TRAINED". Raises ConfigError."""
    try:
        rates = dict(zip(KINDS, map(float, dollars_per_million.split(",")), strict=True))
    except ValueError:
        rates = {}
    if not rates or not all(0 <= rate < math.inf for rate in rates.values()):
        raise ConfigError(
            f"--dollars-per-million must be three prices such as 0.1,0.4,0.4, got {dollars_per_million!r}"
        )
    # The learner of art-tinker reads the logprobs of its rows in a pass of its own.
    tokens = {
        "prompt": workload.prompts.count + workload.rows,
        "sampled": workload.decode.count,
        "trained": workload.rows,
    }
    return Price(workload.source, tokens, {kind: tokens[kind] * rates[kind] / 1e6 for kind in KINDS}, steps)
