"""What an audit found. Knows nothing about where it came from."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Problem:
    """One thing that is not as it was when it was sampled or trained."""

    kind: str
    """``file`` (the store cannot be read there), ``missing`` (a call is gone), ``digest`` (a call is not what was recorded),
    ``context`` (a tree's path is not the call), ``trained`` (a step's record and the store disagree), ``weights`` (damaged or
    changed), ``logprob`` (the weights give other logprobs)."""
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
    """What ``audit`` found. All means are over the tokens of the calls that were recomputed, tokens that a grammar forced left
    out; with d = recomputed - stored logprob and the expectation over what the stored policy sampled."""

    run_dir: Path
    calls: int
    """Those of trajectories; calls that a retry replaced are checked in the file and counted nowhere."""
    checked: int
    """Recomputed with the weights that sampled them."""
    not_kept: int
    """Whose weights are not there any more."""
    not_drawn: int
    """Left out by ``sample``."""
    checked_tokens: int
    updates: int
    """Optimizer steps whose record was compared with the store."""
    trained_tokens: int
    """Targets of those steps, rebuilt from the store."""
    trained_elsewhere: int
    """Trajectories that steps trained and that this run did not sample: they cannot be compared."""
    tolerance: float
    mismatch_mean: float
    """Mean |d|, in nats."""
    mismatch_max: float
    kl_k1: float
    """Mean of -d: the unbiased estimate of KL(stored || recomputed)."""
    kl_k3: float
    """Mean of exp(d) - d - 1 (Schulman, http://joschu.net/blog/kl-approx.html): of the same, unbiased, never negative."""
    problems: tuple[Problem, ...] = field(repr=False)

    @property
    def clean(self) -> bool:
        """Whether nothing is wrong. Calls whose weights are gone are not wrong, they are unknown: see ``not_kept``."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON values; numbers that are not finite as None."""
        said = {name: _finite(value) for name, value in dataclasses.asdict(self).items()}
        return {"clean": self.clean, **said, "run_dir": str(self.run_dir)}


@dataclass
class Findings:
    """What has been found so far."""

    problems: list[Problem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """By the names of ``Audit``'s fields."""
    absolute: float = 0.0
    largest: float = 0.0
    k1: float = 0.0
    k3: float = 0.0
    """Sums over the checked tokens."""

    @property
    def calls(self) -> int:
        return self.counts["calls"]

    def add(self, kind: str, text: str, rollout_id: str | None = None, call: int | None = None) -> None:
        self.problems.append(Problem(kind, text, rollout_id, call))

    def compare(
        self, place: tuple[str, int], stored: np.ndarray, found: np.ndarray, free: np.ndarray, tolerance: float
    ) -> None:
        """Take a call's stored and recomputed logprobs; ``free`` are the positions that no grammar forced."""
        differences = (found - stored)[free]
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
            at = int(free[worst])
            text = (
                f"the weights that sampled it give its tokens other logprobs: stored {stored[at]:.6g}, recomputed "
                f"{found[at]:.6g}; {int((~(sizes <= tolerance)).sum())} of {len(free)} tokens differ by more than {tolerance:g}"
            )
            self.problems.append(Problem("logprob", text, *place, position=at))

    def report(self, run_dir: Path, tolerance: float) -> Audit:
        tokens = self.counts["checked_tokens"]
        names = {it.name for it in dataclasses.fields(Audit) if it.type == "int"}
        return Audit(
            run_dir=run_dir,
            **{name: self.counts[name] for name in names},
            tolerance=tolerance,
            mismatch_mean=self.absolute / tokens if tokens else math.nan,
            mismatch_max=self.largest if tokens else math.nan,
            kl_k1=self.k1 / tokens if tokens else math.nan,
            kl_k3=self.k3 / tokens if tokens else math.nan,
            problems=tuple(self.problems),
        )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
