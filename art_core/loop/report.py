"""The result of an evaluation, and the ``report.json`` of a run."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from art_core.loop.metrics import Z, wilson_interval
from art_core.loop.run import Run
from art_core.redaction import without_access
from art_core.store.run_folder import write_whole
from art_core.types import Trajectory


@dataclass(frozen=True)
class Report:
    """The result of an evaluation."""

    trajectories: tuple[Trajectory, ...] = field(repr=False)
    """One per task, in order."""
    temperature: float | None
    """Imposed on the agent; None: the agent's own."""
    run_dir: Path | None = None
    """The run folder that records the rollouts."""

    @property
    def mean_reward(self) -> float:
        """Over the scored rollouts; NaN if none is scored."""
        rewards = self._rewards
        return sum(rewards) / len(rewards) if rewards else math.nan

    @property
    def counts_successes(self) -> bool:
        """Whether ``success`` is a rate: a reward set ``metrics["success"]``, or all rewards are 0 or 1."""
        return self._sets_success or set(self._rewards) <= {0.0, 1.0}

    @property
    def successes(self) -> list[float]:
        """Per rollout ``metrics["success"]``, or if no rollout has it the reward; 0 if missing."""
        if self._sets_success:
            return [t.metrics.get("success", 0.0) for t in self.trajectories]
        return [t.reward or 0.0 for t in self.trajectories]

    @property
    def success(self) -> float:
        """The mean of ``successes``: a success rate if ``counts_successes``, else a mean reward."""
        return sum(self.successes) / len(self.trajectories)

    @property
    def stderr(self) -> float:
        """Standard error of ``success`` over the tasks; 0 for a single one."""
        values, mean = self.successes, self.success
        variance = sum((x - mean) ** 2 for x in values) / max(1, len(values) - 1)
        return math.sqrt(variance / len(values))

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of ``success``: Wilson's if every value is 0 or 1, else the normal one."""
        values, mean = self.successes, self.success
        if set(values) <= {0.0, 1.0}:
            return wilson_interval(mean, len(values))
        return mean - Z * self.stderr, mean + Z * self.stderr

    @property
    def unscored(self) -> int:
        """Rollouts without a reward."""
        return len(self.trajectories) - len(self._rewards)

    @property
    def _rewards(self) -> list[float]:
        return [t.reward for t in self.trajectories if t.reward is not None]

    @property
    def _sets_success(self) -> bool:
        return any("success" in t.metrics for t in self.trajectories)

    def __str__(self) -> str:
        low, high = self.interval
        if not self.counts_successes:
            return f"mean reward {self.success:.3g} (95 %: {low:.3g} to {high:.3g})"
        graded = "" if set(self._rewards) <= {0.0, 1.0} else f", mean reward {self.mean_reward:.3g}"
        return f"success {self.success:.1%} (95 %: {low:.1%} to {high:.1%}){graded}"

    def as_json(self) -> dict[str, Any]:
        return {
            "success": self.success,
            "counts_successes": self.counts_successes,
            "n": len(self.trajectories),
            "stderr": self.stderr,
            "interval": self.interval,
            "mean_reward": self.mean_reward if self._rewards else None,
            "temperature": self.temperature,
            "unscored": self.unscored,
        }


OF_TRAINING = ("seconds", "seed", "model", "loss", "learner", "reward", "config")
"""Entries of ``report.json`` that no evaluation changes."""


def write_report(run: Run) -> dict[str, Any]:
    """Write ``report.json`` from the store and return it.

    A call that took no step keeps the entries of training as they were written, one that measured nothing either all of them.
    """
    file, report = run.run_dir / "report.json", json.loads(json.dumps(_report(run)))
    written = json.loads(file.read_text()) if file.is_file() else {}
    if written.get("steps") == run.step:
        report |= {name: written[name] for name in OF_TRAINING if name in written}
        if all(written.get(name) == report[name] for name in ("evaluations", "stopped")):
            return written
    write_whole(file, json.dumps(report, indent=2) + "\n")
    return report


def _report(run: Run) -> dict[str, Any]:
    meta = run.store.meta
    evaluations = [
        {name: value for name, value in evaluation.items() if name != "rollout_ids"}
        for evaluation in meta("evaluations", [])
    ]
    first = {evaluation["name"]: evaluation for evaluation in reversed(evaluations)}  # of several temperatures
    stopped = meta("stopped", {})
    return {
        "before": first.get("before"),
        "after": first.get("after"),
        "evaluations": evaluations,
        "seconds": sum(metrics.get("seconds", 0.0) for _, metrics in run.history()),
        "steps": run.step,
        "seed": run.config.seed,
        "model": run.config.model,
        **{name: meta(name) for name in ("start_weights", "loss", "learner", "reward")},
        "account": run.rewards.account(),
        "exhausted": run.rewards.exhausted(),
        "stopped": stopped if stopped.get("step") == run.step else None,
        "calls_elsewhere": meta("calls_elsewhere", {"refused": {}, "passed": {}}),
        "changes": meta("changes", []),
        "config": without_access(dataclasses.asdict(run.config)),
    }
