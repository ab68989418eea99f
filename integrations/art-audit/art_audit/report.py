"""The result of an audit."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from art_core.learner.sizes import SMALL_MODEL

TOLERANCE = {0: 1e-4, SMALL_MODEL: 1e-3}
"""Nats, by the parameters from which they hold. If engine and audit both compute in float32, logprobs of a small model differ by
1e-6 to 2e-5 because of the order of summation, those of a model of 135M parameters by up to 1e-4. Those of an engine in bfloat16
(on a GPU, vLLM) differ by hundredths for a small model and by some tenths for a large one: use 0.5."""


@dataclass(frozen=True)
class Problem:
    """One thing that differs from what was sampled or trained."""

    kind: str
    """``file`` (part of the store cannot be read), ``missing`` (a call was removed), ``digest`` (a call was changed),
    ``context`` (a tree's path differs from the call), ``trained`` (a step's record and the store disagree), ``weights`` (damaged
    or changed), ``logprob`` (the weights give other logprobs)."""
    text: str
    rollout_id: str | None = None
    call: int | None = None
    """Index in ``Trajectory.calls``."""
    position: int | None = None
    """Index in ``Call.sampled_ids``."""

    def __str__(self) -> str:
        place = [f"rollout {self.rollout_id}"] if self.rollout_id is not None else []
        place += [f"call {self.call}"] if self.call is not None else []
        place += [f"position {self.position}"] if self.position is not None else []
        return f"{self.kind}: {', '.join(place)}: {self.text}" if place else f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Audit:
    """The result of ``audit``.

    Means are over the tokens of the recomputed calls, without tokens that a grammar forced. Below, d is the recomputed minus the
    stored logprob, and expectations are over samples of the stored policy.
    """

    run_dir: Path
    calls: int
    """Calls of trajectories; calls that a retry replaced are checked but not counted."""
    checked: int
    """Calls that were recomputed with the weights that sampled them."""
    not_kept: int
    """Calls whose weights no longer exist."""
    not_drawn: int
    """Calls that ``sample`` skipped."""
    checked_tokens: int
    updates: int
    """Optimizer steps whose record was compared with the store."""
    trained_tokens: int
    """Targets of those steps, rebuilt from the store."""
    trained_elsewhere: int
    """Trajectories that steps trained but this run did not sample; they cannot be compared."""
    tolerance: float
    mismatch_mean: float
    """Mean |d|, in nats."""
    mismatch_max: float
    kl_k1: float
    """Mean of -d: the unbiased estimate of KL(stored || recomputed)."""
    kl_k3: float
    """Mean of exp(d) - d - 1 (Schulman, http://joschu.net/blog/kl-approx.html): the same, unbiased and never negative."""
    problems: tuple[Problem, ...] = field(repr=False)

    @property
    def clean(self) -> bool:
        """Whether there are no problems. Calls whose weights no longer exist are not problems; see ``not_kept``."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Return all fields as JSON values; numbers that are not finite become None."""
        fields = {name: _finite(value) for name, value in dataclasses.asdict(self).items()}
        return {"clean": self.clean, **fields, "run_dir": str(self.run_dir)}


@dataclass
class Findings:
    """Collects the results of an audit."""

    tolerance: float | None = None
    """As passed; None: ``TOLERANCE``."""
    parameters: int = 0
    """Of the model that is recomputed."""
    problems: list[Problem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Integer fields of ``Audit``, by name."""
    absolute: float = 0.0
    largest: float = 0.0
    k1: float = 0.0
    k3: float = 0.0
    """Sums over the checked tokens."""

    @property
    def accepted(self) -> float:
        """The largest acceptable difference of a token's logprob, in nats."""
        usual = max(value for parameters, value in TOLERANCE.items() if self.parameters >= parameters)
        return usual if self.tolerance is None else self.tolerance

    @property
    def calls(self) -> int:
        return self.counts["calls"]

    def add(self, kind: str, text: str, rollout_id: str | None = None, call: int | None = None) -> None:
        self.problems.append(Problem(kind, text, rollout_id, call))

    def compare(self, place: tuple[str, int], stored: np.ndarray, recomputed: np.ndarray, free: np.ndarray) -> None:
        """Compare a call's stored and recomputed logprobs at the positions ``free``, which no grammar forced."""
        differences, tolerance = (recomputed - stored)[free], self.accepted
        self.counts["checked"] += 1
        self.counts["checked_tokens"] += len(free)
        if not len(free):
            return
        sizes = np.where(np.isnan(differences), np.inf, np.abs(differences))
        worst = int(sizes.argmax())
        with np.errstate(over="ignore", invalid="ignore"):
            self.k3 += float((np.exp(differences) - differences - 1).sum())
        self.k1 -= float(differences.sum())
        self.absolute += float(sizes.sum())
        self.largest = max(self.largest, float(sizes[worst]))
        if not sizes[worst] <= tolerance:
            position = int(free[worst])
            text = (
                f"logprobs differ from those of the weights that sampled the call: stored {stored[position]:.6g}, recomputed "
                f"{recomputed[position]:.6g}; {int((~(sizes <= tolerance)).sum())} of {len(free)} tokens differ by more than "
                f"{tolerance:g}"
            )
            self.problems.append(Problem("logprob", text, *place, position=position))

    def report(self, run_dir: Path) -> Audit:
        tokens = self.counts["checked_tokens"]
        names = {each.name for each in dataclasses.fields(Audit) if each.type == "int"}
        return Audit(
            run_dir=run_dir,
            **{name: self.counts[name] for name in names},
            tolerance=self.accepted,
            mismatch_mean=self.absolute / tokens if tokens else math.nan,
            mismatch_max=self.largest if tokens else math.nan,
            kl_k1=self.k1 / tokens if tokens else math.nan,
            kl_k3=self.k3 / tokens if tokens else math.nan,
            problems=tuple(self.problems),
        )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
